"""How much may be spent on what can be left out."""

from __future__ import annotations

from dynamo_vllm.console.decisions.allowance import Allowance


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_allowance_is_a_share_of_the_time_and_saved_up_to_a_limit() -> None:
    clock = Clock()
    allowance = Allowance(0.01, 0.1, clock)
    allowance.spend(0.15)
    clock.now = 4.0
    assert not allowance.has_some()
    clock.now = 6.0
    assert allowance.has_some()
    clock.now = 1000.0
    assert allowance.has_some()
    allowance.spend(0.1)
    assert not allowance.has_some()
