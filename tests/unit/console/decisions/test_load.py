"""What workers were doing when a request was routed, and the cost that the router computed from it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dynamo_vllm.console.decisions import load
from dynamo_vllm.console.decisions.allowance import Allowance
from dynamo_vllm.console.decisions.cost import AGGREGATED, DECODE, PREFILL, cost, counted_blocks
from dynamo_vllm.console.decisions.load import LiveLoad, PastLoad, Stay
from dynamo_vllm.console.decisions.shapes import Load, Overlap, Weights, Worker

A, B = Worker(1), Worker(2)


def test_live_load_counts_blocks_once() -> None:
    live = LiveLoad()
    live.add("x", A, [1, 2], 40)
    live.add("y", A, [1, 3], 7)
    assert live.of([A], [1, 4])[A] == Load(2, 47, 4)
    assert live.of([B], [1, 4])[B] == Load(0, 0, 2)
    live.prefilled("x", A)
    live.free("y", A)
    assert live.of([A], [9])[A] == Load(1, 0, 3)


def test_live_load_forgets_what_ends() -> None:
    live = LiveLoad()
    live.add("x", A, [1], 5)
    live.add("x", B, [1], 0)
    live.free("x", B)
    live.free("x", B)
    assert (live.of([A], [])[A], live.of([B], [])[B]) == (Load(1, 5, 1), Load())
    live.forget(A)
    assert live.of([A], [])[A] == Load()


def test_live_load_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_ACTIVE", 2)
    live = LiveLoad()
    for name in "xyz":
        live.add(name, A, [], 1)
    assert live.of([A], [])[A].requests == 2


def stay(
    began: float, prefilled: float, ended: float, blocks: int, where: Worker = A, who: str = "f"
) -> Stay:
    return Stay(where, who, began, prefilled, ended, 10, (blocks,))


def test_past_load_is_that_of_the_moment() -> None:
    own = stay(5.0, 6.0, 7.0, 1)
    others = [stay(1.0, 2.0, 4.0, 2), stay(2.0, 3.0, 9.0, 3), stay(4.0, 5.5, 8.0, 4), stay(5.5, 6.0, 9.0, 5)]
    past = PastLoad([*others, own], 0.0)
    assert past.at([A, B], own, None) == {A: Load(2, 10, 3), B: Load(0, 0, 1)}


def test_frontend_without_sync_knows_only_its_own_requests() -> None:
    own = stay(5.0, 6.0, 7.0, 1)
    past = PastLoad([stay(4.0, 6.0, 8.0, 2, who="other")], 0.0)
    assert past.at([A], own, "f")[A].requests == 0
    assert past.at([A], own, None)[A].requests == 1


def test_moment_is_clear_unless_something_happened_near_it() -> None:
    own = stay(5.0, 6.0, 7.0, 1)
    past = PastLoad([own, stay(4.0, 4.5, 8.0, 2)], 0.0)
    assert past.is_clear(own, None, 0.4)
    assert not past.is_clear(own, None, 0.5)


def test_past_load_reaches_as_far_as_requests_are_kept() -> None:
    past = PastLoad([stay(0.0, 0.0, 3.0, 1)], 2.0)
    assert (past.reaches(1.5), past.reaches(2.5)) == (False, True)


def test_live_load_does_not_go_through_all_blocks_that_are_held() -> None:
    class Held(Counter[int]):
        def keys(self) -> Any:
            raise AssertionError("each candidate of each booking would cost as much as there are blocks")

        __iter__ = keys

    live = LiveLoad()
    live._blocks[A] = Held([1, 2, 3])
    assert live.of([A], [3, 4, 4, 5])[A] == Load(0, 0, 5)


def test_cost_is_what_runtime_1_6_1_logged() -> None:
    for phase, overlap, active, tokens, logged in (
        (AGGREGATED, Overlap(8), Load(0, 0, 8), 257, 8.0),
        (AGGREGATED, Overlap(9), Load(1, 0, 20), 312, 276.0),
        (AGGREGATED, Overlap(0, 0, 9), Load(1, 0, 21), 312, 397.0),
        (AGGREGATED, Overlap(), Load(0, 0, 9), 312, 165.0),
        (PREFILL, Overlap(), Load(1, 43, 0), 443, 499.0),
        (PREFILL, Overlap(), Load(0, 0, 5), 443, 221.5),
        (DECODE, Overlap(3), Load(2, 99, 33), 443, 545.0),
    ):
        assert cost(phase, Weights(), overlap, active, tokens, 32) == logged


def test_lower_tiers_count_less() -> None:
    assert counted_blocks(Weights(host=0.5), Overlap(2, 4, 8)) == 6.0
    assert cost(AGGREGATED, Weights(), Overlap(1, 1, 1), Load(), 320, 32) == 16 * (10 - 1.5 - 0.75 - 0.25)


def test_other_routers_are_not_recomputed() -> None:
    others = (Weights(router="random"), Weights(temperature=0.5), Weights(uses_events=False))
    assert [weights.is_recomputable for weights in (Weights(), *others)] == [True, False, False, False]


def test_allowance_is_a_share_of_the_time_and_saved_up_to_a_limit() -> None:
    now = 0.0
    allowance = Allowance(0.01, 0.1, lambda: now)
    allowance.spend(0.15)
    now = 4.0
    assert not allowance.has_some()
    now = 6.0
    assert allowance.has_some()
    now = 1000.0
    assert allowance.has_some()
    allowance.spend(0.1)
    assert not allowance.has_some()
