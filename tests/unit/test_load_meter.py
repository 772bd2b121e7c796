"""Figures for the router and for Prometheus."""

from __future__ import annotations

from dynamo_vllm.engine.base import LoadFigures
from dynamo_vllm.serving.metrics import LoadMeter, exposition


class Router:
    def __init__(self) -> None:
        self.told: list[tuple[int | None, int | None]] = []

    def publish(self, dp_rank: int | None = None, *, kv_used_blocks: int | None = None) -> None:
        self.told.append((dp_rank, kv_used_blocks))


def test_first_values_at_start_for_every_rank() -> None:
    meter, router = LoadMeter(), Router()
    meter.record(LoadFigures(1, 0, 0, 0.5))
    meter.connect(router, 100, range(2))
    assert router.told == [(0, 0), (1, 50)]


def test_the_router_hears_of_changes_only() -> None:
    meter, router = LoadMeter(), Router()
    meter.connect(router, 100, range(1))
    for usage in (0.1, 0.1, 0.101, 0.2):
        meter.record(LoadFigures(0, 1, 0, usage))
    assert router.told == [(0, 0), (0, 10), (0, 20)]


def test_series_carry_rank_and_model() -> None:
    meter = LoadMeter()
    meter.connect(Router(), 10, range(2))
    meter.record(LoadFigures(1, 3, 2, 0.5))
    text = exposition(meter, 4, 'a"b')
    assert 'dynamo_component_requests_running{model="a\\"b",dp_rank="1"} 3' in text
    assert 'dynamo_component_active_blocks{model="a\\"b",dp_rank="1"} 5' in text
    assert 'dynamo_component_requests_in_flight{model="a\\"b"} 4' in text
