"""Runs `bench plane`: measures everything around the engine, with a fake engine that costs almost nothing.

Each round sends requests to a worker twice: directly on the request plane, which measures the worker alone,
and through a frontend, which measures the whole path. The direct caller uses more CPU time than a worker, so
the worker's limit is computed from its CPU time per token.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.bench.load import command as load
from dynamo_vllm.bench.local.command import run_local
from dynamo_vllm.bench.local.deployment import FOLDER_PREFIX, Deployment, LocalProcess, deployment, tail
from dynamo_vllm.bench.report.rounds import Range, alternating, print_line, ratios, spread
from dynamo_vllm.bench.report.run_report import table
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import LoadOptions, PlaneOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.config.rules.bench_local import OURS
from dynamo_vllm.errors import StartError
from dynamo_vllm.models.tiny import make_tiny_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.bench.report.run_report import StageReport

MODEL = "tiny"
ADDRESS = "dynamo.backend.generate"
ONE_BY_ONE = ("--messages-per-second", "0")
"""What is measured is the cost of a message; `--tokens-per-frame` says how many tokens each has."""
ROUND_SECONDS = 300.0


class PlaneFigures(msgspec.Struct, frozen=True):
    """The figures of one worker on one path, in one round."""

    tokens_per_second: float
    worker_us: float
    """CPU time of the worker per token, in microseconds."""
    frontend_us: float | None = None
    client_us: float | None = None


class Measured(msgspec.Struct):
    """The figures of one worker in all rounds, by path."""

    direct: list[PlaneFigures] = []
    frontend: list[PlaneFigures] = []

    @property
    def paths(self) -> dict[str, list[PlaneFigures]]:
        """The rounds of each path that was measured."""
        found = {"direct": self.direct, "frontend": self.frontend}
        return {path: rounds for path, rounds in found.items() if rounds}


def add_arguments(parser: build.Parser) -> None:
    build.add_options(parser, PlaneOptions)


def run(given: argparse.Namespace) -> int:
    return run_local(given, PlaneOptions, checks.check_plane, measure, report, "measured")


def measure(options: PlaneOptions, environment: Mapping[str, str]) -> dict[str, Measured]:
    """Measure every worker in every round, on both paths."""
    peers = bench_local.peers(options)
    measured = {name: Measured() for name in (OURS, *peers)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)))
        model = make_tiny_model(folder / "model")
        places = {}
        for name in measured:
            here = stack.enter_context(deployment(folder / name, environment))
            places[name] = start(here, name, model, peers.get(name), options)
        for number, name in alternating(tuple(measured), options.rounds):
            measured[name].direct.append(call_directly(places[name], options))
            if options.frontend:
                measured[name].frontend.append(call_frontend(places[name], options))
            print_line(f"round {number + 1} of {options.rounds}: {name}")
    return measured


class PlaneSite(msgspec.Struct, frozen=True):
    """A worker and its frontend, with a discovery folder of their own."""

    here: Deployment
    worker: LocalProcess
    frontend: LocalProcess


def start(
    here: Deployment, name: str, model: Path, command: Sequence[str] | None, options: PlaneOptions
) -> PlaneSite:
    args = ["--model", str(model), "--served-model-name", MODEL]
    if command is None:
        spec = json.dumps({"tokens_per_output": options.tokens_per_frame})
        worker = here.start_worker(name, *args, "--engine", "fake", "--fake-engine", spec, *ONE_BY_ONE)
    else:
        worker = here.start_command(name, [*command, *args])
    frontend = here.start_frontend("frontend", "--router", "round-robin")
    here.wait_for_workers(frontend, 1)
    return PlaneSite(here, worker, frontend)


def call_directly(place: PlaneSite, options: PlaneOptions) -> PlaneFigures:
    command = [sys.executable, "-m", "dynamo_vllm.bench.local.caller", ADDRESS]
    command += ["--model", MODEL, "--watch", str(place.worker.pid), *load_flags(options)]
    found = json.loads(output_of(command, place.here))
    tokens = found["tokens"]
    return PlaneFigures(
        tokens_per_second=tokens / found["seconds"],
        worker_us=1e6 * found["worker_cpu_seconds"] / tokens,
        client_us=1e6 * found["client_cpu_seconds"] / tokens,
    )


def call_frontend(place: PlaneSite, options: PlaneOptions) -> PlaneFigures:
    asked = LoadOptions(
        url=place.frontend.url,
        model=MODEL,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        concurrency=str(options.concurrency),
        requests=options.requests,
        warmup=options.concurrency,
        watch=(f"worker={place.worker.pid}", f"frontend={place.frontend.pid}"),
    )
    return figures_from_load(load.measure(asked).report.stages[0])


def figures_from_load(stage: StageReport) -> PlaneFigures:
    """Take the figures from those of `bench load`."""
    worker, frontend = stage.processes["worker"], stage.processes["frontend"]
    if stage.requests.failed or worker is None or frontend is None:
        raise StartError(f"{stage.requests.failed} requests failed: {stage.errors}")
    return PlaneFigures(
        tokens_per_second=stage.tokens.output_per_second,
        worker_us=worker.cpu_us_per_token or 0.0,
        frontend_us=frontend.cpu_us_per_token,
        client_us=stage.client.cpu_us_per_token,
    )


def load_flags(options: PlaneOptions) -> list[str]:
    flags = {
        "--concurrency": options.concurrency,
        "--requests": options.requests,
        "--input-tokens": options.input_tokens,
        "--output-tokens": options.output_tokens,
    }
    return [word for flag, count in flags.items() for word in (flag, str(count))]


def output_of(command: Sequence[str], here: Deployment) -> str:
    errors = here.folder / "client.log"
    with errors.open("wb") as log:
        done = subprocess.run(
            command, env=here.env, stdout=subprocess.PIPE, stderr=log, text=True, timeout=ROUND_SECONDS
        )
    if done.returncode:
        raise StartError(f"the client failed:\n{done.stdout[-1000:]}{tail(errors)}")
    return done.stdout


def report(measured: dict[str, Measured]) -> str:
    """Return a table with a row per worker and path, and lines that compare our worker with the others."""
    rows = [
        [f"{name}, {path}", *cells(found)]
        for name, rounds in measured.items()
        for path, found in rounds.paths.items()
    ]
    head = ["", "TOK/S", "WORKER µs/token", "WORKER TOK/S/core", "FRONTEND µs/token", "CLIENT µs/token"]
    lines = [table(head, rows)]
    (_, ours), *others = measured.items()
    for name, rounds in others:
        lines += [compare(path, name, ours.paths[path], found) for path, found in rounds.paths.items()]
    return "\n".join(lines)


def cells(found: Sequence[PlaneFigures]) -> list[str]:
    columns = (
        [one.tokens_per_second for one in found],
        [one.worker_us for one in found],
        [1e6 / one.worker_us if one.worker_us else None for one in found],
        [one.frontend_us for one in found],
        [one.client_us for one in found],
    )
    return [
        "–" if None in column else str(spread([v for v in column if v is not None])) for column in columns
    ]


def compare(path: str, name: str, ours: Sequence[PlaneFigures], theirs: Sequence[PlaneFigures]) -> str:
    faster = ratios([one.tokens_per_second for one in ours], [one.tokens_per_second for one in theirs])
    cheaper = ratios([one.worker_us for one in theirs], [one.worker_us for one in ours])
    return f"{OURS} against {name}, {path}: tokens/s × {text(faster)}, worker CPU per token ÷ {text(cheaper)}"


def text(found: Range | None) -> str:
    return "–" if found is None else str(found)
