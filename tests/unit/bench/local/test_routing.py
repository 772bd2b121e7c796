"""Figures of a replay, and the trace that is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.bench.load import trace
from dynamo_vllm.bench.local import routing
from dynamo_vllm.bench.local.deployment import Deployment
from dynamo_vllm.bench.local.routing import COUNTERS, DONE, HITS, QUERIES, TIER_HITS
from dynamo_vllm.bench.local.routing_figures import (
    Ceilings,
    PrefixCache,
    Replay,
    RoutingOutcome,
    ceilings,
    report,
    with_tiers,
)
from dynamo_vllm.bench.report.figures import Requests, Spread, Tokens
from dynamo_vllm.bench.report.run_report import StageReport
from dynamo_vllm.config.options import RoutingOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.errors import ConfigError, StartError
from harness.stage_reports import stage_report

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="8192",user_specified_block_size="True"} 1.0
vllm:prefix_cache_hits_total{engine="0"} 640.0
vllm:prefix_cache_hits_total{engine="1"} 60.0
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
"""


def stage(**changes: Any) -> StageReport:
    about = {
        "seconds": 10.0,
        "requests": Requests(4, 0, 0, 0.4),
        "tokens": Tokens(1000, 400, "usage", 8, 0.8),
    }
    return stage_report(**{**about, "ttft_ms": Spread(30.0, 20.0, 40.0, 50.0, 60.0, 70.0), **changes})


def grown(hits: float, queries: float, done: float) -> dict[str, float]:
    return {**dict.fromkeys(COUNTERS, 0.0), HITS: hits, QUERIES: queries, DONE: done}


def test_replay_takes_hits_from_the_answers_and_from_the_engines() -> None:
    replay = routing.replay_of(stage(), [grown(300, 700, 3), grown(90, 300, 1)])
    assert (replay.hit_rate, replay.engine_hit_rate) == (0.4, 0.39)
    assert replay.shares == [0.75, 0.25]
    assert (replay.ttft_p50_ms, replay.ttft_p95_ms, replay.prompt_tokens_per_second) == (20.0, 50.0, 100.0)
    tiers = routing.replay_of(stage(), [{**grown(300, 1000, 1), TIER_HITS: 250.0}])
    assert (tiers.engine_hit_rate, tiers.tier_hit_rate, tiers.ttft_p99_ms) == (0.3, 0.25, 60.0)
    failed = stage(requests=Requests(3, 1, 0, 0.3), errors={"HTTP 500": 1})
    with pytest.raises(StartError, match="1 requests failed: .*HTTP 500"):
        routing.replay_of(failed, [grown(0, 1, 1)])


def test_every_mode_is_measured_with_and_without_tiers() -> None:
    assert with_tiers(["kv", "random"], RoutingOptions()) == ["kv", "random"]
    both = with_tiers(["kv", "random"], RoutingOptions(kv_offload_gb=1.0))
    assert both == ["kv", "kv + tiers", "random", "random + tiers"]


def test_size_of_the_cache_comes_from_the_metrics() -> None:
    assert routing.read_cache(METRICS) == PrefixCache(8192, 32)
    with pytest.raises(StartError, match="size of its cache"):
        routing.read_cache("")


def written(folder: Path, rows: list[tuple[int, int, list[int]]]) -> str:
    """A trace of these lengths of prompts and answers, and blocks."""
    lines = [
        {"timestamp": 0, "input_length": length, "output_length": answer, "hash_ids": ids}
        for length, answer, ids in rows
    ]
    (folder / "t").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "t")


def test_answers_are_cut_and_prompts_are_not(tmp_path: Path) -> None:
    file = written(tmp_path, [(1000, length, [1, 2]) for length in (5, 900)])
    options = RoutingOptions(trace=file, trace_block=32, output_tokens=2)
    lines = trace.read(routing.write_short_trace(options, tmp_path))
    scaled = trace.scale(lines, block=32, speed=1.0, context=None).requests
    assert [(request.input_tokens, request.output_tokens) for request in scaled] == [(63, 1), (63, 2)]
    with pytest.raises(ConfigError, match="--trace-block 1024 is too large for --output-tokens 1"):
        routing.write_short_trace(RoutingOptions(trace="f", trace_block=1024, output_tokens=1), tmp_path)


def test_ceiling_within_the_cache_counts_all_workers(tmp_path: Path) -> None:
    """22 blocks from one use to the next: lost in the 16 of one worker, found in the 32 of two."""
    lines = trace.read(Path(written(tmp_path, [(512, 1, [number]) for number in (1, *range(2, 12), 1)])))
    one, two = (ceilings(lines, None, PrefixCache(16, 32), workers, 64) for workers in (1, 2))
    assert one.within_cache == 0.0
    assert two.within_cache == two.infinite == one.infinite > 0.0


def test_modes_are_routers_or_flags_of_the_frontend() -> None:
    options = RoutingOptions(mode=("kv", "heavy=--router kv --kv-overlap-weight 2"))
    assert bench_local.modes(options) == {
        "kv": ["--router", "kv"],
        "heavy": ["--router", "kv", "--kv-overlap-weight", "2"],
    }


def test_report_compares_the_first_mode_with_the_others() -> None:
    def replay(hits: float, ms: float) -> Replay:
        return Replay(hits, hits, ms, 2 * ms, 1.0, 100.0, 1.0, [0.5, 0.5], 0, 0.0)

    outcome = RoutingOutcome(
        PrefixCache(100, 32),
        Ceilings(0.5, 0.4),
        {"kv": [replay(0.38, 10.0)] * 2, "random": [replay(0.3, 25.0)] * 2},
    )
    text = report(outcome)
    assert "50.0% with an infinite cache, 40.0% with 2 × 100 blocks of 32 tokens" in text
    assert "95.0 (95.0–95.0)" in text
    assert "random against kv: TTFT p50 × 2.50 (2.50–2.50), p95 × 2.50" in text


def test_threads_are_shared_between_workers_unless_somebody_said_how_many() -> None:
    options = RoutingOptions(workers=1000)
    assert routing.with_thread_limit(options, {}) == {"OMP_NUM_THREADS": "1"}
    assert routing.with_thread_limit(options, {"OMP_NUM_THREADS": "7"}) == {"OMP_NUM_THREADS": "7"}


def test_processes_may_ask_the_hub_unless_the_user_forbids_it(tmp_path: Path) -> None:
    """The model may be a hub id."""
    assert "HF_HUB_OFFLINE" not in Deployment(tmp_path, {}).env
    assert Deployment(tmp_path, {"HF_HUB_OFFLINE": "1"}).env["HF_HUB_OFFLINE"] == "1"
