"""A tenant has so many bytes of bodies on their way, and stands in nobody else's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_vllm.gateway.control.pending_bodies import FORGET_SECONDS, PendingBodies
from harness.refusals import refused

LARGEST, MOST = 40, 100


async def full(**settings: Any) -> PendingBodies:
    """A tenant whose bodies "a" and "b" leave no room for another large one."""
    pending = PendingBodies(LARGEST, most=MOST, **settings)
    for name in ("a", "b"):
        await pending.begin(name, "t", LARGEST)
    return pending


async def test_bodies_above_the_limit_wait_and_then_are_refused() -> None:
    pending = await full(wait_seconds=0.01)
    with refused(429) as refusal:
        await pending.begin("c", "t", LARGEST)
    assert refusal.value.headers["retry-after"]
    assert pending.bytes_of("t") == 2 * LARGEST
    await pending.begin("d", "other", LARGEST)


async def test_an_unknown_or_a_huge_length_counts_as_the_largest_body() -> None:
    pending = PendingBodies(LARGEST, most=MOST)
    await pending.begin("a", "t", None)
    await pending.begin("b", "t", 10**18)
    assert pending.bytes_of("t") == 2 * LARGEST


async def test_many_small_bodies_are_a_large_one() -> None:
    pending = PendingBodies(LARGEST, most=MOST, least=10, wait_seconds=0.01)
    for number in range(10):
        assert pending.begin_at_once(str(number), "t", 1)
    assert not pending.begin_at_once("next", "t", 0)
    with refused(429):
        await pending.begin("next", "t", 0)
    assert pending.begin_at_once("next", "other", 1)
    pending.end("0")
    assert pending.begin_at_once("next", "t", 1)


async def test_those_that_wait_get_in_in_order_when_a_body_has_come() -> None:
    pending = await full(least=1, wait_seconds=60)
    waiting = [asyncio.ensure_future(pending.begin(name, "t", LARGEST)) for name in ("c", "d")]
    middle = asyncio.ensure_future(pending.begin("e", "t", 2))  # would fit, and does not overtake
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*waiting, middle))
    assert pending.begin_at_once("f", "t", 1), "a small body needs no turn"
    pending.end("f")
    pending.end("a")
    await asyncio.wait_for(waiting[0], 20)
    assert not waiting[1].done() and not middle.done()
    for name in ("b", "c"):
        pending.end(name)
    await asyncio.wait_for(asyncio.gather(waiting[1], middle), 20)
    for name in ("d", "e"):
        pending.end(name)
    assert pending.bytes_of("t") == 0


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_client_that_leaves_while_it_waits_leaves_nothing(has_room: bool) -> None:
    pending = await full(wait_seconds=60)
    waiting = asyncio.ensure_future(pending.begin("c", "t", LARGEST))
    await asyncio.sleep(0)
    if has_room:
        pending.end("a")  # room comes at the same moment
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for name in ("a", "b", "c", "c"):
        pending.end(name)
    assert pending.bytes_of("t") == 0
    await pending.begin("d", "t", LARGEST)


async def test_a_body_whose_end_nobody_told_is_forgotten() -> None:
    now = 0.0
    pending = await full(clock=lambda: now)
    now = FORGET_SECONDS + 1
    await pending.begin("c", "t", LARGEST)
    assert pending.bytes_of("t") == LARGEST


async def test_one_body_may_always_come() -> None:
    pending = PendingBodies(500, most=MOST)
    await pending.begin("a", "t", None)
    assert pending.bytes_of("t") == 500
