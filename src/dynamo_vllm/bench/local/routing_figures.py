"""What `bench routing` finds out about a trace and about a router, and how it reports it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.bench.load import trace
from dynamo_vllm.bench.load.made_traces import MADE
from dynamo_vllm.bench.report.rounds import ratios, spread
from dynamo_vllm.bench.report.run_report import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dynamo_vllm.config.options import RoutingOptions

TRACE_BLOCK = 32
TIERS = " + tiers"
"""Ends the name of a mode with workers that have tiers of KV caches."""


class PrefixCache(msgspec.Struct, frozen=True):
    """The size of one worker's prefix cache."""

    blocks: int
    block_size: int


class Ceilings(msgspec.Struct, frozen=True):
    """The hit rates of a single worker that gets every request in order."""

    infinite: float
    """With a cache that holds everything."""
    within_cache: float
    """With a cache as large as those of all workers together, and least-recently-used eviction."""


class Replay(msgspec.Struct, frozen=True):
    """The figures of one router mode in one round."""

    hit_rate: float
    """The cached share of all prompt tokens, from the usage of the answers."""
    engine_hit_rate: float
    """The same share from vLLM's counters, without tiers."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    shares: list[float]
    """The share of the requests that each worker got."""
    preemptions: int
    client_late_ms: float
    ttft_p99_ms: float = 0.0
    tier_hit_rate: float | None = None
    """The share of all prompt tokens that came from tiers, from vLLM's counters."""


class RoutingOutcome(msgspec.Struct, frozen=True):
    cache: PrefixCache
    ceilings: Ceilings
    replays: dict[str, list[Replay]]


def with_tiers(modes: Iterable[str], options: RoutingOptions) -> list[str]:
    """Return what is measured in turn: each mode, and again with tiers if they are to be compared."""
    return [mode + suffix for mode in modes for suffix in ("", TIERS) if not suffix or options.kv_offload_gb]


# --- the trace ------------------------------------------------------------------------------------------


def lines(options: RoutingOptions) -> list[trace.Line]:
    if (make := MADE.get(str(options.trace))) is None:
        return trace.read(Path(str(options.trace)), options.limit)
    return sorted(make(), key=lambda line: line.timestamp)[: options.limit]


def trace_block(options: RoutingOptions) -> int:
    return options.trace_block or (trace.BLOCK if options.simulate else TRACE_BLOCK)


def ceilings(
    found: Sequence[trace.Line], context: int | None, cache: PrefixCache, workers: int, block: int
) -> Ceilings:
    scaled = trace.scale(found, block=block, speed=1.0, context=context)
    return Ceilings(
        trace.ceiling(scaled.requests, cache.block_size).rate,
        trace.ceiling(scaled.requests, cache.block_size, cache.blocks * workers).rate,
    )


# --- the report -----------------------------------------------------------------------------------------


def summary_line(replay: Replay) -> str:
    shares = "/".join(f"{share:.0%}" for share in replay.shares)
    return (
        f"hit rate {replay.hit_rate:.1%}, TTFT p50 {replay.ttft_p50_ms:.0f} ms, "
        f"p95 {replay.ttft_p95_ms:.0f} ms, p99 {replay.ttft_p99_ms:.0f} ms, requests by worker {shares}"
    )


def report(outcome: RoutingOutcome) -> str:
    cache, limit = outcome.cache, outcome.ceilings
    rows = [[mode, *cells(found, limit)] for mode, found in outcome.replays.items()]
    head = ["ROUTER", "HIT RATE %", "OF CEILING %", "TTFT p50 ms", "p95", "p99", "PROMPT TOK/S", "BUSIEST %"]
    first, *others = outcome.replays.items()
    ceiling = (
        f"one worker that sees every request: {limit.infinite:.1%} with an infinite cache, "
        f"{limit.within_cache:.1%} with {len(first[1][0].shares)} × {cache.blocks} blocks "
        f"of {cache.block_size} tokens"
    )
    compared = [compare(first[0], first[1], mode, found) for mode, found in others]
    return "\n".join([ceiling, table(head, rows), *compared])


def cells(found: Sequence[Replay], limit: Ceilings) -> list[str]:
    columns = (
        [100 * one.hit_rate for one in found],
        [100 * one.hit_rate / (limit.within_cache or 1.0) for one in found],
        [one.ttft_p50_ms for one in found],
        [one.ttft_p95_ms for one in found],
        [one.ttft_p99_ms for one in found],
        [one.prompt_tokens_per_second for one in found],
        [100 * max(one.shares) for one in found],
    )
    return [str(spread(column)) for column in columns]


def compare(first: str, ours: Sequence[Replay], mode: str, theirs: Sequence[Replay]) -> str:
    """Compare the times to first token with those of the first mode, round by round."""
    p50 = ratios([one.ttft_p50_ms for one in theirs], [one.ttft_p50_ms for one in ours])
    p95 = ratios([one.ttft_p95_ms for one in theirs], [one.ttft_p95_ms for one in ours])
    p99 = ratios([one.ttft_p99_ms for one in theirs], [one.ttft_p99_ms for one in ours])
    return f"{mode} against {first}: TTFT p50 × {p50}, p95 × {p95}, p99 × {p99}"
