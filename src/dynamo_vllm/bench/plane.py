"""`bench plane`: everything around the engine, with an engine that costs next to nothing.

A worker over the fake engine is driven twice in each round: straight on the request plane, which shows what
the worker itself can do, and through a frontend, which shows the whole path. The caller on the request plane
is busier than a worker, so the worker's ceiling is what its processor time per token allows.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.bench.deployment import COMMAND, Deployment, Running, deployment, tail
from dynamo_vllm.bench.rounds import Range, alternating, ratios, say, spread, table, write_json
from dynamo_vllm.config import build
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.models.tiny import make_tiny_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

OURS = "dynamo-vllm"
MODEL = "tiny"
ADDRESS = "dynamo.backend.generate"
ROUND_SECONDS = 300.0


class Figures(msgspec.Struct, frozen=True):
    """One way through one worker, in one round."""

    tokens_per_second: float
    worker_us: float
    """Processor time of the worker per token, in microseconds."""
    frontend_us: float | None = None
    client_us: float | None = None


class Measured(msgspec.Struct):
    """All rounds of one worker."""

    direct: list[Figures] = []
    frontend: list[Figures] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time (default: 32)")
    parser.add_argument("--requests", type=int, default=256, help="requests per measurement (default: 256)")
    parser.add_argument("--input-tokens", type=int, default=16, help="tokens of a prompt (default: 16)")
    parser.add_argument("--output-tokens", type=int, default=256, help="tokens of an answer (default: 256)")
    parser.add_argument(
        "--tokens-per-frame",
        type=int,
        default=1,
        help="tokens the fake engine hands out at once (default: 1)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each worker (default: 3)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another worker to measure in turn; it gets --model and --served-model-name",
    )
    parser.add_argument("--no-frontend", action="store_true", help="measure the worker alone only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round")


def run(options: argparse.Namespace) -> int:
    peers = dict(map(peer_of, options.peer))
    measured = {name: Measured() for name in (OURS, *peers)}
    environment = build.environment()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-vllm-bench-")))
        model = make_tiny_model(folder / "model")
        places: dict[str, Place] = {}
        for name in measured:
            here = stack.enter_context(deployment(folder / name, environment))
            places[name] = start(here, name, model, peers.get(name), options)
        for number, name in alternating(tuple(measured), options.rounds):
            measured[name].direct.append(call_directly(places[name], options))
            if not options.no_frontend:
                measured[name].frontend.append(call_frontend(places[name], options))
            say(f"round {number + 1} of {options.rounds}: {name}")
    say(report(measured))
    write_json(options.json, {"version": 1, "settings": settings(options), "measured": measured})
    return 0


class Place(msgspec.Struct, frozen=True):
    """A worker and its frontend, in a discovery of their own."""

    here: Deployment
    worker: Running
    frontend: Running


def start(
    here: Deployment, name: str, model: Path, command: Sequence[str] | None, options: argparse.Namespace
) -> Place:
    args = ["--model", str(model), "--served-model-name", MODEL]
    if command is None:
        spec = json.dumps({"tokens_per_output": options.tokens_per_frame})
        worker = here.start_worker(name, *args, "--engine", "fake", "--fake-engine", spec)
    else:
        worker = here.start_command(name, [*command, *args])
    frontend = here.start_frontend("frontend", "--router", "round-robin")
    here.wait_for_workers(frontend, 1)
    return Place(here, worker, frontend)


def call_directly(place: Place, options: argparse.Namespace) -> Figures:
    command = [sys.executable, "-m", "dynamo_vllm.serving.caller", ADDRESS]
    command += ["--model", MODEL, "--watch", str(place.worker.pid), *load_flags(options)]
    found = json.loads(output_of(command, place.here))
    tokens = found["tokens"]
    return Figures(
        tokens_per_second=tokens / found["seconds"],
        worker_us=1e6 * found["worker_cpu_seconds"] / tokens,
        client_us=1e6 * found["client_cpu_seconds"] / tokens,
    )


def call_frontend(place: Place, options: argparse.Namespace) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        report_file = Path(folder, "load.json")
        command = [*COMMAND, "bench", "load", place.frontend.url, "--model", MODEL, "--prompts", "random"]
        command += ["--warmup", str(options.concurrency), "--quiet", "--json", str(report_file)]
        command += ["--watch", f"worker={place.worker.pid}", "--watch", f"frontend={place.frontend.pid}"]
        output_of([*command, *load_flags(options)], place.here)
        return from_load(json.loads(report_file.read_text()))


def from_load(found: dict[str, Any]) -> Figures:
    """From what `bench load` wrote."""
    (stage,) = found["stages"]
    if stage["requests"]["failed"]:
        raise StartError(f"{stage['requests']['failed']} requests failed: {stage['errors']}")
    processes = stage["processes"]
    return Figures(
        tokens_per_second=stage["tokens"]["output_per_second"],
        worker_us=processes["worker"]["cpu_us_per_token"],
        frontend_us=processes["frontend"]["cpu_us_per_token"],
    )


def load_flags(options: argparse.Namespace) -> list[str]:
    names = ("concurrency", "requests", "input_tokens", "output_tokens")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def output_of(command: Sequence[str], here: Deployment) -> str:
    errors = here.folder / "client.log"
    with errors.open("wb") as log:
        done = subprocess.run(
            command, env=here.env, stdout=subprocess.PIPE, stderr=log, text=True, timeout=ROUND_SECONDS
        )
    if done.returncode:
        raise StartError(f"the client failed:\n{done.stdout[-1000:]}{tail(errors)}")
    return done.stdout


def peer_of(text: str) -> tuple[str, list[str]]:
    name, equals, command = text.partition("=")
    if not equals or not name or not command or name == OURS:
        raise ConfigError(f"--peer {text}: write NAME=COMMAND, and another name than {OURS}")
    return name, shlex.split(command)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("concurrency", "requests", "input_tokens", "output_tokens", "tokens_per_frame", "rounds")
    return {name: getattr(options, name) for name in names}


def report(measured: dict[str, Measured]) -> str:
    """A row for each way through each worker, and what ours is to the others'."""
    rows, ways = [], ("direct", "frontend")
    for name, rounds in measured.items():
        for way in ways:
            found: list[Figures] = getattr(rounds, way)
            if found:
                rows.append([f"{name}, {way}", *cells(found)])
    head = ["", "tokens/s", "worker µs/token", "frontend µs/token", "client µs/token"]
    lines = [table(head, rows)]
    ours, *others = measured.items()
    for name, rounds in others:
        for way in ways:
            if getattr(rounds, way):
                lines.append(compare(way, name, getattr(ours[1], way), getattr(rounds, way)))
    return "\n".join(lines)


def cells(found: Sequence[Figures]) -> list[str]:
    columns = ("tokens_per_second", "worker_us", "frontend_us", "client_us")
    values = [[getattr(one, column) for one in found] for column in columns]
    return [str(spread(column)) if None not in column else "–" for column in values]


def compare(way: str, name: str, ours: Sequence[Figures], theirs: Sequence[Figures]) -> str:
    faster = ratios([one.tokens_per_second for one in ours], [one.tokens_per_second for one in theirs])
    cheaper = ratios([one.worker_us for one in theirs], [one.worker_us for one in ours])
    return f"{OURS} against {name}, {way}: tokens/s × {text(faster)}, worker CPU per token ÷ {text(cheaper)}"


def text(found: Range | None) -> str:
    return "–" if found is None else str(found)
