"""The router's cost, with figures that runtime 1.6.1 logged."""

from __future__ import annotations

import pytest

from dynamo_vllm.console.decisions.cost import AGGREGATED, DECODE, PREFILL, cost, counted_blocks
from dynamo_vllm.console.decisions.shapes import Load, Overlap, Weights


@pytest.mark.parametrize(
    ("phase", "overlap", "load", "tokens", "logged"),
    [
        (AGGREGATED, Overlap(8), Load(0, 0, 8), 257, 8.0),
        (AGGREGATED, Overlap(9), Load(1, 0, 20), 312, 276.0),
        (AGGREGATED, Overlap(0, 0, 9), Load(1, 0, 21), 312, 397.0),
        (AGGREGATED, Overlap(), Load(0, 0, 9), 312, 165.0),
        (PREFILL, Overlap(), Load(1, 43, 0), 443, 499.0),
        (PREFILL, Overlap(), Load(0, 0, 5), 443, 221.5),
        (DECODE, Overlap(3), Load(2, 99, 33), 443, 545.0),
    ],
)
def test_cost_is_the_routers(phase: str, overlap: Overlap, load: Load, tokens: int, logged: float) -> None:
    assert cost(phase, Weights(), overlap, load, tokens, 32) == logged


def test_lower_tiers_count_less() -> None:
    assert counted_blocks(Weights(host=0.5), Overlap(2, 4, 8)) == 6.0
    assert cost(AGGREGATED, Weights(), Overlap(1, 1, 1), Load(), 320, 32) == 16 * (10 - 1.5 - 0.75 - 0.25)


@pytest.mark.parametrize(
    "weights", [Weights(router="random"), Weights(temperature=0.5), Weights(uses_events=False)]
)
def test_other_routers_are_not_recomputed(weights: Weights) -> None:
    assert not weights.is_recomputable
