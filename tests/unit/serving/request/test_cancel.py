"""What one timer asks all requests in flight."""

from __future__ import annotations

import pytest

from dynamo_vllm import wire
from dynamo_vllm.serving.request import cancel
from dynamo_vllm.serving.request.cancel import InFlight
from harness.fakes import FakeContext, make_worker, request
from harness.waiting import until_async


@pytest.fixture
def told() -> list[tuple[str, int]]:
    return []


@pytest.fixture
async def in_flight(told: list[tuple[str, int]]) -> InFlight:
    made = InFlight((await make_worker()).engine)
    made.tell_router = lambda context, rank: told.append((context.id(), rank))
    return made


async def test_router_need_not_wait_for_a_request_that_loads_an_image(
    in_flight: InFlight, told: list[tuple[str, int]]
) -> None:
    with in_flight.watch(FakeContext("loads")) as loads, in_flight.watch(FakeContext("computes")) as computes:
        loads.rank = 3
        computes.computes()
        await until_async("a report", lambda: told)
    assert told == [("loads", 3)]


async def test_router_need_not_wait_for_a_request_that_hangs(
    in_flight: InFlight, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "HOLD_SECONDS", 0.2)
    with in_flight.watch(FakeContext("hangs")) as hangs:
        hangs.computes()
        await until_async("a report", lambda: told)
        in_flight._look()
    assert told == [("hangs", 0)]


async def test_request_with_tokens_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "HOLD_SECONDS", 3600.0)
    worker, told = await make_worker(token_ms=50), list[str]()
    worker.in_flight.tell_router = lambda context, rank: told.append(context.id())
    await worker.generate(request(max_tokens=8))
    assert told == []


async def test_client_that_left_is_found_while_its_request_waits(in_flight: InFlight) -> None:
    context = FakeContext()
    with in_flight.watch(context) as watch:
        context.stop()
        await until_async("the look", lambda: watch.client_left)


def test_rank_is_the_one_that_the_router_chose() -> None:
    assert wire.routed_rank(wire.parse(request() | {"routing": {"dp_rank": 2}})) == 2
    assert wire.routed_rank(wire.parse(request() | {"routing": None})) == 0
    assert wire.routed_rank(object()) == 0
