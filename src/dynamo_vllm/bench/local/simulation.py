"""Replays a trace in the runtime's simulator: its own router over engines that only take simulated time."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from dynamo._core import run_mocker_trace_replay

from dynamo_vllm.bench.load import trace
from dynamo_vllm.bench.local import routing_figures
from dynamo_vllm.bench.local.deployment import FOLDER_PREFIX
from dynamo_vllm.bench.local.routing_figures import TIERS, PrefixCache, Replay, RoutingOutcome
from dynamo_vllm.bench.report.rounds import alternating, print_line
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.serving.plane.router_config import kv_router_config, queue_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.options import RoutingOptions

CACHE = PrefixCache(blocks=1 << 16, block_size=16)
"""A million tokens, as a GPU of 141 GB has them beside a model of 8 billion parameters."""
BATCH_TOKENS = 8192
EVENT_LAG_MS = 5.0
"""From an engine to the router."""
TOKEN_BYTES = 128 * 1024
"""The KV cache of a token: 32 layers, 8 heads of 128 values, keys and values of 2 bytes."""
HOST_GB_PER_SECOND = 25.0
"""Each way between a GPU and host memory: 16 lanes of PCIe 4."""
_GB = 10**9


def measure(options: RoutingOptions) -> RoutingOutcome:
    modes = {name: frontend_options(name, flags) for name, flags in bench_local.modes(options).items()}
    names = routing_figures.with_tiers(modes, options)
    lines, block = routing_figures.lines(options), routing_figures.trace_block(options)
    replays: dict[str, list[Replay]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        file = Path(folder, "trace.jsonl")
        file.write_bytes(
            b"".join(msgspec.json.encode(line) + b"\n" for line in resized(lines, block, options))
        )
        for number, name in alternating(tuple(names), options.rounds):
            mode = modes[name.removesuffix(TIERS)]
            replay = simulate(file, block, mode, options, engine(options, tiers=name.endswith(TIERS)))
            replays[name].append(replay)
            print_line(
                f"round {number + 1} of {options.rounds}, {name}: {routing_figures.summary_line(replay)}"
            )
    computing, cache = options.prefill_workers or options.workers, cache_of(options)
    return RoutingOutcome(cache, routing_figures.ceilings(lines, None, cache, computing, block), replays)


def cache_of(options: RoutingOptions) -> PrefixCache:
    return PrefixCache(options.cache_blocks or CACHE.blocks, CACHE.block_size)


def engine(options: RoutingOptions | None = None, *, tiers: bool = False) -> dict[str, Any]:
    cache = CACHE if options is None else cache_of(options)
    made: dict[str, Any] = {
        "num_gpu_blocks": cache.blocks,
        "block_size": cache.block_size,
        "max_num_batched_tokens": BATCH_TOKENS,
    }
    if options is not None and tiers:
        room = int((options.kv_offload_gb or 0) * _GB) // (TOKEN_BYTES * cache.block_size)
        speed = dict.fromkeys(("d2h_bandwidth_gbps", "h2d_bandwidth_gbps"), HOST_GB_PER_SECOND)
        made["kv_cache_bytes_per_token"] = TOKEN_BYTES
        made["native_host_offload"] = {"num_host_blocks": room, **speed}
    return made


def frontend_options(mode: str, flags: Sequence[str]) -> FrontendOptions:
    options, rest = build.parse(FrontendOptions, list(flags), {}, "bench routing", "")
    if rest:
        raise ConfigError(f"--mode {mode}: {rest[0]} is no option of the frontend")
    checks.check_frontend(options)
    if options.router not in ("kv", "round-robin"):
        raise ConfigError(f"--mode {mode}: the simulator has kv and round-robin, but not {options.router}")
    return options


def resized(lines: Sequence[trace.Line], block: int, options: RoutingOptions) -> list[trace.Line]:
    """Scale the lengths to blocks of so many tokens, and cut the answers."""
    scaled = trace.scale(lines, block=block, speed=1.0, context=None).requests
    longest = options.output_tokens or max(request.output_tokens for request in scaled)
    return [
        trace.Line(
            request.at * 1000, request.input_tokens, min(request.output_tokens, longest), request.hash_ids
        )
        for request in scaled
    ]


def simulate(
    file: Path, block: int, front: FrontendOptions, options: RoutingOptions, engine: Mapping[str, Any]
) -> Replay:
    config = None
    if front.router == "kv":
        config = kv_router_config(front, queue_seconds(front) * tokens_per_second() / BATCH_TOKENS)
    return replay_of(
        _run(
            file,
            router_mode="round_robin" if config is None else "kv_router",
            router_config=config,
            trace_block_size=block,
            arrival_speedup_ratio=options.rate_scale,
            kv_event_lag_ms=None if config is None else EVENT_LAG_MS,
            **_workers(options, engine),
        ),
        options.workers,
    )


def _workers(options: RoutingOptions, engine: Mapping[str, Any]) -> dict[str, Any]:
    if not options.prefill_workers:
        return {"num_workers": options.workers, "extra_engine_args": {"engine": engine}}
    return {
        "num_prefill_workers": options.prefill_workers,
        "num_decode_workers": options.workers,
        "prefill_engine_args": {"engine": {**engine, "worker_type": "prefill"}},
        "decode_engine_args": {"engine": {**engine, "worker_type": "decode"}},
    }


@functools.cache
def tokens_per_second() -> float:
    """How many prompt tokens the simulated engine computes in a second."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        file = Path(folder, "trace.jsonl")
        ids = list(range(BATCH_TOKENS // trace.BLOCK))
        file.write_bytes(msgspec.json.encode(trace.Line(0, BATCH_TOKENS, 1, ids)))
        found = _run(file, trace_block_size=trace.BLOCK, extra_engine_args={"engine": engine()})
    return float(BATCH_TOKENS / found.summary["median_ttft_ms"] * 1000)


def _run(file: Path, **options: Any) -> Any:
    return run_mocker_trace_replay([str(file)], capture_per_request=True, **options)


def replay_of(found: Any, workers: int) -> Replay:
    summary: Mapping[str, float] = found.summary
    counts = [0] * workers
    for request in found.per_request:
        counts[request["decode_worker_idx"]] += 1
    rate = summary["prefix_cache_reused_ratio"]
    return Replay(
        hit_rate=rate,
        engine_hit_rate=rate,
        ttft_p50_ms=summary["median_ttft_ms"],
        ttft_p95_ms=summary["p95_ttft_ms"],
        requests_per_second=summary["request_throughput_rps"],
        prompt_tokens_per_second=summary["input_throughput_tok_s"],
        output_tokens_per_second=summary["output_throughput_tok_s"],
        shares=[count / sum(counts) for count in counts],
        preemptions=0,
        client_late_ms=0.0,
        ttft_p99_ms=summary["p99_ttft_ms"],
    )
