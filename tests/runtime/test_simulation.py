"""The defaults of the router, judged by the runtime's simulator on traffic of several kinds.

Simulated time does not depend on this machine, so these may compare times.
"""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.bench.local import routing_figures, simulation
from dynamo_vllm.bench.local.routing_figures import RoutingOutcome
from dynamo_vllm.config.options import RoutingOptions
from dynamo_vllm.errors import ConfigError


def simulated(**options: Any) -> RoutingOutcome:
    given = {"mode": ("kv", "round-robin"), "rounds": 1, "simulate": True, **options}
    return simulation.measure(RoutingOptions(**given))


# Of the times with round-robin, at most; of the ceiling, at least. Single runs differ by a few hundredths.
@pytest.mark.parametrize(
    ("trace", "p50", "p95", "hits"),
    [
        ("tenants", 1.1, 0.8, 0.97),
        ("agents", 0.7, 0.5, 0.97),
        ("alone", 1.1, 1.0, 0.0),
        ("bursts", 1.1, 2.5, 0.0),
        ("shared", 1.1, 1.2, 0.95),
    ],
)
def test_defaults_win_where_prompts_repeat_and_lose_nowhere(
    trace: str, p50: float, p95: float, hits: float
) -> None:
    found = simulated(trace=trace, workers=4, rate_scale=2.0)
    [kv], [plain] = found.replays["kv"], found.replays["round-robin"]
    assert kv.ttft_p50_ms < p50 * plain.ttft_p50_ms
    assert kv.ttft_p95_ms < p95 * plain.ttft_p95_ms
    assert kv.hit_rate >= hits * found.ceilings.within_cache
    assert kv.output_tokens_per_second > 0.9 * plain.output_tokens_per_second
    assert max(kv.shares) < 0.4, "no worker does the work of the others"


def test_prefill_and_decode_workers_are_simulated_and_no_decoder_starves() -> None:
    found = simulated(trace="agents", workers=5, prefill_workers=2)
    [kv] = found.replays["kv"]
    assert len(kv.shares) == 5
    assert min(kv.shares) > 0.1


def test_tiers_find_what_small_caches_have_lost() -> None:
    small: dict[str, Any] = {"workers": 2, "cache_blocks": 4096, "limit": 200, "mode": ("kv",)}
    found = simulated(trace="agents", kv_offload_gb=400.0, **small)
    [plain], [tiers] = found.replays["kv"], found.replays["kv + tiers"]
    assert found.cache.blocks == 4096
    assert tiers.hit_rate > 1.2 * plain.hit_rate
    assert plain.hit_rate < found.ceilings.within_cache < tiers.hit_rate < found.ceilings.infinite
    assert tiers.ttft_p99_ms < plain.ttft_p99_ms


def test_answers_and_blocks_of_the_trace_can_be_changed() -> None:
    asked: dict[str, Any] = {"trace": "alone", "limit": 20, "mode": ("kv",)}
    [whole] = simulated(**asked).replays["kv"]
    [short] = simulated(**asked, output_tokens=2, trace_block=32).replays["kv"]
    assert short.output_tokens_per_second < whole.output_tokens_per_second
    assert short.ttft_p50_ms < whole.ttft_p50_ms


def test_made_traces_are_the_same_each_time_and_in_order() -> None:
    for name in ("tenants", "agents", "alone", "bursts", "shared"):
        first, again = (routing_figures.lines(RoutingOptions(trace=name)) for _ in range(2))
        assert first == again
        assert [line.timestamp for line in first] == sorted(line.timestamp for line in first)
        assert all(-(-line.input_length // 512) == len(line.hash_ids) for line in first)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("random", "kv and round-robin, but not random"),
        ("x=--router kv --block-size 16", "--block-size is no option of the frontend"),
        ("x=--kv-overlap-weight=-1", "must be 0 or more"),
    ],
)
def test_mode_that_cannot_be_simulated_is_refused(mode: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(trace="alone", mode=(mode,))
