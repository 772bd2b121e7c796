"""Who waits for memory, who goes on without, and that all of it comes back."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from dynamo_vllm.errors import Overloaded
from dynamo_vllm.media.admission import TimeBudget
from dynamo_vllm.media.held_bytes import Hold, MediaMemory, held_by_request, holding


class Thing:
    """Something large."""


async def settle() -> None:
    """As many turns of the loop as anything here takes."""
    for _ in range(20):
        await asyncio.sleep(0)


async def waits(step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A step that has no room yet."""
    task = asyncio.create_task(step)
    await settle()
    assert not task.done()
    return task


async def test_step_waits_until_there_is_room() -> None:
    memory, old, young, thing = MediaMemory(100), Hold(), Hold(), Thing()
    memory.keep(old, thing, 100)
    waiting = await waits(memory.take(young, ()))
    memory.drop(old, thing)
    await asyncio.wait_for(waiting, 30)
    assert memory.bytes == 0


async def test_oldest_request_goes_on_and_then_the_next() -> None:
    memory, old, young = MediaMemory(100), Hold(), Hold()
    memory.keep(old, Thing(), 70)
    memory.keep(young, Thing(), 70)
    await asyncio.wait_for(memory.take(old, ()), 30)
    memory.keep(old, Thing(), 1000)
    memory.keep(young, Thing(), 50)
    waiting = await waits(memory.take(young, ()))
    assert memory.bytes == 1190
    old.release()
    await asyncio.wait_for(waiting, 30)
    assert memory.bytes == 120, "above the limit still, but nobody else holds anything"


async def test_oldest_request_that_held_nothing_makes_way_too() -> None:
    memory, old, young = MediaMemory(100), Hold(), Hold()
    await memory.take(old, ())
    memory.keep(young, Thing(), 100)
    waiting = await waits(memory.take(young, ()))
    old.release()
    await asyncio.wait_for(waiting, 30)


async def test_request_without_room_keeps_nobody_from_a_place() -> None:
    memory, old, young, place = MediaMemory(100), Hold(), Hold(), asyncio.Semaphore(1)
    memory.keep(old, Thing(), 100)
    waiting = await waits(memory.take(young, (place,)))
    async with asyncio.timeout(30), memory.turn(old, (place,)):
        old.release()
        await settle()
        assert not waiting.done(), "there is room, but no place"
    await asyncio.wait_for(waiting, 30)
    assert place.locked()


async def test_waiting_for_room_ends_and_leaves_nothing() -> None:
    memory, old, young, place = MediaMemory(100), Hold(), Hold(), asyncio.Semaphore(1)
    memory.keep(old, Thing(), 100)
    with pytest.raises(Overloaded):
        await memory.take(young, (place,), TimeBudget(0.02, Overloaded("late")))
    young.release()
    assert not place.locked() and len(memory) == 1


async def test_oldest_is_woken_though_many_began_to_wait_before_it() -> None:
    memory, first, old = MediaMemory(100), Hold(), Hold()
    memory.keep(first, Thing(), 90)
    memory.keep(old, Thing(), 10)
    crowd = [asyncio.create_task(memory.take(Hold(), ())) for _ in range(200)]
    await settle()
    waiting = await waits(memory.take(old, ()))
    first.release()  # room for a moment: the first who pass take it
    memory.keep(Hold(), Thing(), 1000)
    await asyncio.wait_for(waiting, 30)
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


async def test_all_of_many_have_their_turn() -> None:
    """More than are woken at a time, with steps that hold a little or nothing."""
    memory, old, place = MediaMemory(100), Hold(), asyncio.Semaphore(2)
    memory.keep(old, Thing(), 100)
    served = 0

    async def one(number: int) -> None:
        nonlocal served
        hold = Hold()
        try:
            async with memory.turn(hold, (place,)):
                memory.keep(hold, Thing(), number % 3 * 40)
            await asyncio.sleep(0)
            served += 1
        finally:
            hold.release()

    tasks = [asyncio.create_task(one(number)) for number in range(300)]
    await settle()
    for task in tasks[::7]:
        task.cancel()
    await settle()
    assert served == 0
    old.release()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert (served, memory.bytes, len(memory)) == (300 - len(tasks[::7]), 0, 0)


async def test_what_two_requests_share_counts_once_and_until_the_last() -> None:
    memory, one, other, thing = MediaMemory(100), Hold(), Hold(), Thing()
    for hold in (one, one, other):
        memory.keep(hold, thing, 60)
    assert memory.bytes == 60
    one.release()
    assert memory.bytes == 60
    other.release()
    other.release()
    assert (memory.bytes, len(memory)) == (0, 0)


async def test_what_is_let_go_is_not_kept_alive() -> None:
    memory, hold, thing = MediaMemory(100), Hold(), Thing()
    memory.keep(hold, thing, 1)
    alive = weakref.ref(thing)
    del thing
    gc.collect()
    assert alive() is not None, "its address must not mean another thing meanwhile"
    hold.release()
    assert alive() is None


async def test_request_lets_go_at_its_end_and_its_parts_do_not() -> None:
    memory = MediaMemory(100)

    async def part() -> None:
        with holding() as hold:
            memory.keep(hold, Thing(), 10)

    with pytest.raises(KeyError), held_by_request():
        await part()
        await asyncio.create_task(part())
        assert (memory.bytes, len(memory)) == (20, 1)
        raise KeyError
    assert (memory.bytes, len(memory)) == (0, 0)
    await part()
    assert (memory.bytes, len(memory)) == (0, 0), "of no request: for as long as it is loaded"
