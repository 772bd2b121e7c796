"""Turns between tenants: nobody waits behind all jobs of another, and no slot is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from dynamo_vllm.gateway.tenant_slots import TenantSlots


async def held(slots: TenantSlots, tenant: str, order: list[str], go: asyncio.Event) -> None:
    async with slots.slot(tenant):
        order.append(tenant)
        await asyncio.sleep(0)
        await go.wait()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_second_tenant_gets_the_next_slot_whoever_queued_first() -> None:
    slots, order, go = TenantSlots(lambda: 1), list[str](), asyncio.Event()
    go.set()
    tasks = [asyncio.ensure_future(held(slots, "a", order, go)) for _ in range(50)]
    tasks.append(asyncio.ensure_future(held(slots, "b", order, go)))
    await asyncio.gather(*tasks)
    assert order.index("b") <= 1
    assert (slots.total, slots.waiting) == (0, 0)


async def test_tenants_with_equally_many_take_turns() -> None:
    slots, order, go = TenantSlots(lambda: 1), list[str](), asyncio.Event()
    go.set()
    tasks = [asyncio.ensure_future(held(slots, name, order, go)) for name in "aaaabbbbcccc"]
    await asyncio.gather(*tasks)
    assert sorted(order[:3]) == ["a", "b", "c"] and sorted(order[3:6]) == ["a", "b", "c"]


async def test_a_share_leaves_slots_for_those_who_come_later() -> None:
    slots = TenantSlots(lambda: 16, share=3)
    assert sum(slots.try_take("a") for _ in range(40)) == 12
    assert sum(slots.try_take("b") for _ in range(40)) == 3
    assert sum(slots.try_take("c") for _ in range(40)) == 1
    assert not slots.try_take("d")
    slots.give_back("a")
    assert slots.try_take("d")


async def test_who_waits_goes_before_who_tries() -> None:
    slots, order, go = TenantSlots(lambda: 1), list[str](), asyncio.Event()
    assert slots.try_take("a")
    task = asyncio.ensure_future(held(slots, "b", order, go))
    await settled()
    slots.give_back("a")
    assert not slots.try_take("a")
    await settled()
    assert order == ["b"]
    go.set()
    await task


async def test_a_larger_capacity_is_noticed_without_an_event() -> None:
    capacity = [1]
    slots, order, go = TenantSlots(lambda: capacity[0]), list[str](), asyncio.Event()
    tasks = [asyncio.ensure_future(held(slots, "a", order, go)) for _ in range(3)]
    await settled()
    assert len(order) == 1
    capacity[0] = 3
    async with asyncio.timeout(30):
        while len(order) < 3:
            await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("moment", range(6))
async def test_a_job_that_is_cancelled_at_any_moment_loses_no_slot(moment: int) -> None:
    slots, order, go = TenantSlots(lambda: 1), list[str](), asyncio.Event()
    assert slots.try_take("a")
    task = asyncio.ensure_future(held(slots, "b", order, go))
    other: Awaitable[None] = asyncio.ensure_future(held(slots, "c", order, go))
    for step in range(6):
        if step == moment:
            task.cancel()
        if step == 3:
            slots.give_back("a")
        await asyncio.sleep(0)
    task.cancel()
    go.set()
    await asyncio.gather(task, return_exceptions=True)
    await other
    assert (slots.total, slots.waiting) == (0, 0)
