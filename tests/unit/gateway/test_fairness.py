from __future__ import annotations

import asyncio

import pytest

from dynamo_vllm.gateway import fairness
from dynamo_vllm.gateway.fairness import FairShares, priority
from dynamo_vllm.gateway.store.keys import BATCH, CLASSES, HIGH, NORMAL
from harness.refusals import refused


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shares_of(slots: int, clock: Clock | None = None) -> FairShares:
    shares = FairShares(clock or Clock())
    shares.slots = slots
    return shares


def fill(shares: FairShares, tenant: str, count: int) -> None:
    for number in range(count):
        assert not shares.must_wait(tenant), number
        shares.enter(f"{tenant}-{number}", tenant, NORMAL)


def test_classes_stand_above_turns() -> None:
    order = [priority(name, ahead) for name in CLASSES for ahead in (0, 1, 2, 1000, 5000)]
    assert order == sorted(order, reverse=True)
    assert min(order) >= 0


def test_each_further_request_of_a_tenant_stands_further_back() -> None:
    shares = FairShares()
    places = [shares.enter(str(number), "flood", NORMAL) for number in range(3)]
    assert places == sorted(places, reverse=True)
    assert shares.enter("q", "quiet", NORMAL) == places[0]
    assert shares.enter("h", "flood", HIGH) > places[0]
    shares.leave("0")
    shares.leave("1")
    assert shares.enter("3", "flood", NORMAL) == places[2]


def test_nobody_waits_while_the_slots_are_not_known() -> None:
    fill(FairShares(), "flood", 100)


def test_a_tenant_that_is_alone_has_all_slots() -> None:
    shares = shares_of(20)
    fill(shares, "flood", 20)
    assert shares.must_wait("flood")


def test_a_flood_leaves_room_for_a_quiet_tenant_until_that_was_not_seen_for_long() -> None:
    clock = Clock()
    shares = shares_of(20, clock)
    assert not shares.must_wait("quiet")
    fill(shares, "flood", 18)
    assert shares.must_wait("flood")
    fill(shares, "quiet", 2)
    shares.forget()
    clock.now = 2 * fairness.ACTIVE_SECONDS
    fill(shares, "flood", 20)


async def test_waiting_requests_get_in_one_by_one_in_order() -> None:
    shares = shares_of(2)
    fill(shares, "flood", 2)
    came: list[int] = []

    async def one(number: int) -> None:
        assert shares.must_wait("flood")
        await shares.wait("flood")
        came.append(number)
        shares.enter(f"late-{number}", "flood", NORMAL)

    tasks = [asyncio.ensure_future(one(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert shares.waiting == 3
    for name, count in (("flood-0", 1), ("flood-1", 2), ("late-0", 3)):
        shares.leave(name)
        for _ in range(3):
            await asyncio.sleep(0)
        assert came == list(range(count))
    await asyncio.gather(*tasks)
    assert (shares.waiting, shares.in_flight) == (0, 2)


async def test_a_request_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "WAIT_SECONDS", 0.001)
    shares = shares_of(1)
    fill(shares, "flood", 1)
    with refused(429) as refusal:
        await shares.wait("flood")
    assert refusal.value.headers["retry-after"]
    assert shares.waiting == 0


async def test_a_client_that_leaves_gives_its_turn_back() -> None:
    shares = shares_of(1)
    fill(shares, "flood", 1)
    first, second = (asyncio.ensure_future(shares.wait("flood")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    shares.leave("flood-0")
    await asyncio.wait_for(second, 5)


def test_batches_hold_back_while_others_ask() -> None:
    clock = Clock()
    shares = shares_of(16, clock)
    shares.enter("b", "t", BATCH)
    assert shares.busy() == 0.0
    shares.enter("a", "t", NORMAL)
    assert 0 < shares.busy() < 1
    for number in range(8):
        shares.enter(str(number), "t", NORMAL)
    assert shares.busy() == 1.0
    shares.forget()
    assert 0 < shares.busy() < 1, "for a moment"
    clock.now += 2 * fairness.INTERACTIVE_SECONDS
    assert shares.busy() == 0.0


def test_requests_of_a_killed_envoy_are_forgotten() -> None:
    shares = FairShares()
    fill(shares, "a", 2)
    assert shares.forget() == ["a-0", "a-1"]
    assert shares.in_flight == 0
    shares.leave("a-0")


def test_requests_that_envoy_does_not_know_are_forgotten_after_a_moment() -> None:
    clock = Clock()
    shares = FairShares(clock)
    fill(shares, "a", 3)
    assert shares.forget_lost(1) == [], "too early to tell"
    clock.now += 2 * fairness.SETTLED_SECONDS
    shares.enter("new", "a", NORMAL)
    assert shares.forget_lost(2) == ["a-0", "a-1"]
    assert shares.forget_lost(2) == []
    assert shares.in_flight == 2
