"""Runs `bench routing`: replays a trace over several workers, once per router, and compares the hit rates.

All replays use the same workers, or one of two sets, without and with tiers of KV caches. Each replay has its
own frontend and its own prompts (another seed), so it finds only its own blocks in a cache. Blocks of earlier
replays are older, so a full cache evicts them first: every replay can use the whole cache.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.bench.load import command as load
from dynamo_vllm.bench.load import trace
from dynamo_vllm.bench.local.command import run_local
from dynamo_vllm.bench.local.deployment import FOLDER_PREFIX, Deployment, LocalProcess, deployment, get
from dynamo_vllm.bench.local.routing_figures import (
    TIERS,
    PrefixCache,
    Replay,
    RoutingOutcome,
    ceilings,
    lines,
    report,
    summary_line,
    trace_block,
    with_tiers,
)
from dynamo_vllm.bench.report.rounds import alternating, print_line
from dynamo_vllm.config import build, checks, runtime_env
from dynamo_vllm.config.options import LoadOptions, RoutingOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.models.tiny import make_tiny_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.bench.report.run_report import StageReport

MODEL = "model"
WARM_UP_REQUESTS = 4
OUTPUT_TOKENS = 2
# With these flags the tiny model's prefill takes one thread a steady time; the user's flags follow them.
TINY_FLAGS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--block-size", "32")
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
TIER_HITS = "vllm:external_prefix_cache_hits_total"
DONE, PREEMPTED = "vllm:request_success_total", "vllm:num_preemptions_total"
COUNTERS = (QUERIES, HITS, TIER_HITS, DONE, PREEMPTED)


def add_arguments(parser: build.Parser) -> None:
    build.add_options(parser, RoutingOptions)


def run(given: argparse.Namespace) -> int:
    return run_local(given, RoutingOptions, checks.check_routing, measure, report, "outcome")


def measure(options: RoutingOptions, environment: Mapping[str, str]) -> RoutingOutcome:
    if options.simulate:
        runtime_env.export_quiet(environment)
        from dynamo_vllm.bench.local import simulation

        return simulation.measure(options)
    modes = bench_local.modes(options)
    names = with_tiers(modes, options)
    replays: dict[str, list[Replay]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as made, contextlib.ExitStack() as stack:
        folder, limited = Path(made), with_thread_limit(options, environment)
        file = write_short_trace(options, folder)
        places: dict[bool, tuple[Deployment, list[LocalProcess]]] = {}
        for tiers in {name.endswith(TIERS): None for name in names}:
            here = stack.enter_context(deployment(folder / ("run-tiers" if tiers else "run"), limited))
            places[tiers] = here, start_workers(here, options, folder, tiers=tiers)
        cache, context = None, None
        for number, name in alternating(tuple(names), options.rounds):
            here, workers = places[name.endswith(TIERS)]
            mode = name.removesuffix(TIERS)
            frontend = here.start_frontend(f"{mode}-{number}", *modes[mode])
            here.wait_for_workers(frontend, len(workers))
            cache = cache or cache_size(workers[0])
            seed = options.seed * 10_000 + number * len(names) + names.index(name)
            replay, context = replay_once(frontend, workers, file, seed, options)
            replays[name].append(replay)
            here.stop(frontend)
            print_line(f"round {number + 1} of {options.rounds}, {name}: {summary_line(replay)}")
        assert cache is not None
        return RoutingOutcome(
            cache, ceilings(trace.read(file), context, cache, options.workers, trace_block(options)), replays
        )


# --- the workers ----------------------------------------------------------------------------------------


def start_workers(
    here: Deployment, options: RoutingOptions, folder: Path, *, tiers: bool = False
) -> list[LocalProcess]:
    flags = [] if options.model else list(TINY_FLAGS)
    if options.cache_blocks is not None:
        flags += ["--num-gpu-blocks-override", str(options.cache_blocks)]
    if tiers:
        flags += ["--kv-offload-gb", str(options.kv_offload_gb)]
    model = options.model or str(make_tiny_model(folder / "tiny"))
    flags = ["--model", model, "--served-model-name", MODEL, *flags, *bench_local.engine_args(options)]
    return [here.start_worker(f"worker-{number}", *flags) for number in range(options.workers)]


def with_thread_limit(options: RoutingOptions, environment: Mapping[str, str]) -> dict[str, str]:
    """Limit the threads of each worker: on CPU each would use all cores and slow the others down."""
    threads = max(1, (os.cpu_count() or 1) // options.workers)
    return {"OMP_NUM_THREADS": str(threads), **environment}


def cache_size(worker: LocalProcess) -> PrefixCache:
    """Return the size of a worker's cache, from vLLM's metrics."""
    return read_cache(get(f"{worker.url}/metrics") or "")


def read_cache(metrics: str) -> PrefixCache:
    found = dict(re.findall(r'(num_gpu_blocks|block_size)="(\d+)"', info_line(metrics)))
    try:
        return PrefixCache(int(found["num_gpu_blocks"]), int(found["block_size"]))
    except KeyError:
        raise StartError("the worker's metrics do not give the size of its cache") from None


def info_line(metrics: str) -> str:
    return next((row for row in metrics.splitlines() if row.startswith("vllm:cache_config_info{")), "")


# --- one replay -----------------------------------------------------------------------------------------


def replay_once(
    frontend: LocalProcess, workers: Sequence[LocalProcess], file: Path, seed: int, options: RoutingOptions
) -> tuple[Replay, int | None]:
    """Replay the trace once; return the figures, and the context to which prompts were cut."""
    asked = LoadOptions(
        url=frontend.url,
        model=MODEL,
        prompts="trace",
        trace=str(file),
        trace_block=trace_block(options),
        trace_speed=options.rate_scale,
        rate=None if options.rate is None else str(options.rate),
        requests=None,
        seed=seed,
        warmup=WARM_UP_REQUESTS,
        clients=1,
    )
    before = [worker.counters(COUNTERS) for worker in workers]
    made = load.measure(asked).report
    after = [worker.counters(COUNTERS) for worker in workers]
    grown = [{name: b[name] - a[name] for name in COUNTERS} for a, b in zip(before, after, strict=True)]
    return replay_of(made.stages[0], grown), made.settings["context"]


def replay_of(stage: StageReport, grown: Sequence[Mapping[str, float]]) -> Replay:
    """Compute the figures from the stage's report and from the growth of each worker's counters."""
    if stage.requests.failed or not stage.requests.ok:
        raise StartError(f"{stage.requests.failed} requests failed: {stage.errors}")
    totals = {name: sum(worker[name] for worker in grown) for name in COUNTERS}
    return Replay(
        hit_rate=(stage.tokens.cached or 0) / stage.tokens.prompt,
        engine_hit_rate=totals[HITS] / max(1.0, totals[QUERIES]),
        ttft_p50_ms=stage.ttft_ms.p50 or 0.0,
        ttft_p95_ms=stage.ttft_ms.p95 or 0.0,
        requests_per_second=stage.requests.per_second,
        prompt_tokens_per_second=stage.tokens.prompt / stage.seconds,
        output_tokens_per_second=stage.tokens.output_per_second,
        shares=[worker[DONE] / max(1.0, totals[DONE]) for worker in grown],
        preemptions=int(totals[PREEMPTED]),
        client_late_ms=stage.client.late_ms,
        ttft_p99_ms=stage.ttft_ms.p99 or 0.0,
        tier_hit_rate=totals[TIER_HITS] / max(1.0, totals[QUERIES]),
    )


# --- the trace ------------------------------------------------------------------------------------------


def write_short_trace(options: RoutingOptions, folder: Path) -> Path:
    """Write the trace with short answers: only prompts matter for routing, and decoding takes most time."""
    block, answer = trace_block(options), options.output_tokens or OUTPUT_TOKENS
    longest = answer * trace.BLOCK // block
    if not longest:
        raise ConfigError(f"--trace-block {block} is too large for --output-tokens {answer}")
    file = folder / "trace.jsonl"
    with file.open("wb") as out:
        for row in lines(options):
            short = msgspec.structs.replace(row, output_length=min(row.output_length, longest))
            out.write(msgspec.json.encode(short) + b"\n")
    return file
