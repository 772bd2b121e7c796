"""Figures for the router and for Prometheus."""

from __future__ import annotations

import pytest

from dynamo_vllm.engine.base import LoadFigures
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.job import Job, SamplingSpec
from dynamo_vllm.serving.metrics.load_meter import LastError, LoadMeter
from harness.fakes import Clock, outputs


class Router:
    def __init__(self) -> None:
        self.told: list[tuple[int | None, int | None]] = []

    def publish(self, dp_rank: int | None = None, *, kv_used_blocks: int | None = None) -> None:
        self.told.append((dp_rank, kv_used_blocks))


def test_router_hears_of_every_rank_at_the_start_and_then_of_changes_only() -> None:
    meter, router = LoadMeter(), Router()
    meter.record(LoadFigures(1, 0, 0, 0.5))
    meter.connect(router, 100, range(2))
    for usage in (0.1, 0.1, 0.101, 0.2):
        meter.record(LoadFigures(0, 1, 0, usage))
    assert router.told == [(0, 0), (1, 50), (0, 10), (0, 20)]


# --- what an operator sees --------------------------------------------------------------------------------


class Worked:
    """A meter whose rank 0 makes steps, each after so many seconds."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.meter = LoadMeter(self.clock)
        self.made = self.asked = self.found = 0
        self.meter.record(LoadFigures(0, 0, 0, 0.0))

    def step(self, seconds: float, made: int = 0, asked: int = 0, found: int = 0) -> None:
        self.clock.now += seconds
        self.made, self.asked, self.found = self.made + made, self.asked + asked, self.found + found
        self.meter.record(LoadFigures(0, 2, 1, 0.25, self.made, self.asked, self.found))

    @property
    def speed(self) -> float:
        return float(self.meter.ranks()[0]["tokens_per_second"])

    @property
    def hit_rate(self) -> float | None:
        rate: float | None = self.meter.ranks()[0]["hit_rate"]
        return rate


def test_ranks_come_in_order_with_what_is_known() -> None:
    meter = LoadMeter(Clock())
    for rank in (1, 0):
        meter.record(LoadFigures(rank, 3, 2, 0.5))
    known = {"running": 3, "waiting": 2, "kv_usage": 0.5, "hit_rate": None}
    speeds = dict.fromkeys(("tokens_per_second", "prompt_tokens_per_second"), 0.0)
    assert meter.ranks() == [{"rank": rank, **known, **speeds} for rank in (0, 1)]


def test_speed_of_even_work() -> None:
    worked = Worked()
    for _ in range(1000):
        worked.step(0.01, made=8)
    assert worked.speed == pytest.approx(800, rel=0.01)


def test_speed_after_a_pause_knows_nothing_of_what_was_before_it() -> None:
    worked = Worked()
    for _ in range(50):
        worked.step(0.1, made=100)
    worked.step(60, made=10)
    for _ in range(20):
        worked.step(0.1, made=10)
    assert worked.speed == pytest.approx(105)


@pytest.mark.parametrize(("seconds", "made"), [(0.1, 5), (600, 256)])
def test_what_an_engine_does_first_counts_at_once_but_not_as_the_speed_of_a_step(
    seconds: float, made: int
) -> None:
    worked = Worked()
    worked.step(seconds, made=made, asked=100, found=50)
    assert (worked.speed, worked.hit_rate) == (made, 0.5)
    assert worked.meter.ranks()[0]["prompt_tokens_per_second"] == 100


def test_idle_engine_has_no_speed() -> None:
    worked = Worked()
    for _ in range(50):
        worked.step(0.1, made=100)
    worked.clock.now += 3
    assert 0 < worked.speed < 1000
    worked.clock.now += 2.5
    assert worked.speed == 0


def test_hit_rate_is_that_of_the_last_minute() -> None:
    worked = Worked()
    worked.step(2, asked=1000, found=0)
    assert worked.hit_rate == 0
    for _ in range(70):
        worked.step(1, asked=100, found=80)
    assert worked.hit_rate == pytest.approx(0.8)
    worked.clock.now += 61
    assert worked.hit_rate is None


def test_the_last_error_grows_old() -> None:
    clock = Clock()
    errors = LastError(clock)
    assert errors.report() is None
    errors.note("first")
    clock.now += 5
    errors.note("second")
    clock.now += 7
    assert errors.report() == {"message": "second", "seconds_ago": 7}


async def test_the_fake_engine_counts_what_it_makes_and_is_asked() -> None:
    told: list[LoadFigures] = []
    engine = FakeEngine(FakeSpec(ranks=2), told.append)
    await outputs(engine, Job("a", [1, 2, 3], SamplingSpec(max_tokens=5), data_parallel_rank=1))
    assert told[-1] == LoadFigures(1, 0, 0, 0.0, generated_tokens=5, prefix_queries=3, prefix_hits=0)
