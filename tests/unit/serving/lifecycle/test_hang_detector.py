"""Slow or hung, from what a rank's processes do."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dynamo_vllm.engine.process.activity import Vitals
from dynamo_vllm.serving.lifecycle.hang_detector import Effort

IDLE, ACTIVE, STOPPED = Vitals(3.0), Vitals(3.0, is_active=True), Vitals(3.0, is_stopped=True)


def hung_after(looks: Iterable[Vitals], window_seconds: float = 12) -> int | None:
    """The second in which a look, one each second, found it hung."""
    effort = None
    for now, vitals in enumerate(looks):
        effort = effort or Effort(now, vitals, window_seconds)
        effort.note(now, vitals)
        if effort.verdict(now) is not None:
            return now
    return None


def uses(share: float, seconds: int, start: float = 3.0) -> list[Vitals]:
    return [Vitals(start + share * now) for now in range(seconds)]


@pytest.mark.parametrize(
    ("looks", "second"),
    [
        pytest.param([IDLE] * 100, 12, id="deadlock"),
        pytest.param(uses(1.0, 600), None, id="computes"),
        pytest.param(uses(0.1, 600), None, id="computes on a busy machine"),
        pytest.param(uses(0.02, 600), 12, id="polls"),
        pytest.param([ACTIVE] * 600, None, id="waits for a processor, a disk or a GPU"),
        pytest.param([ACTIVE, IDLE, IDLE, IDLE] * 100, 12, id="wakes up now and then"),
        pytest.param(uses(1.0, 60) + [Vitals(62.0)] * 60, 71, id="deadlock after a minute of work"),
        pytest.param([IDLE, STOPPED, STOPPED], 2, id="stopped"),
        pytest.param([IDLE, STOPPED, IDLE, STOPPED, IDLE], None, id="stopped for a moment"),
        pytest.param(uses(1.0, 10, 50.0) + uses(1.0, 600), None, id="a child that computed has ended"),
    ],
)
def test_verdict(looks: list[Vitals], second: int | None) -> None:
    assert hung_after(looks) == second


def test_time_that_the_worker_lost_does_not_count() -> None:
    effort = Effort(0, IDLE, 12)
    effort.shift(300)
    effort.note(311, IDLE)
    assert effort.verdict(311) is None
    effort.note(312, IDLE)
    assert effort.verdict(312) == "used no processor time for 12 s"
