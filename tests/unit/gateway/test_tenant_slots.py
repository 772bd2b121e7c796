"""Turns between tenants: nobody waits behind all jobs of another, and no slot is lost."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_vllm.gateway.tenant_slots import TenantSlots
from harness.waiting import until_async


class Jobs:
    """Jobs of tenants, in the order in which they began; each ends when all may."""

    def __init__(self, slots: TenantSlots) -> None:
        self.slots = slots
        self.order: list[str] = []
        self.may_end = asyncio.Event()

    def start(self, *tenants: str) -> list[asyncio.Future[None]]:
        return [asyncio.ensure_future(self._run(tenant)) for tenant in tenants]

    async def _run(self, tenant: str) -> None:
        async with self.slots.slot(tenant):
            self.order.append(tenant)
            await asyncio.sleep(0)
            await self.may_end.wait()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_second_tenant_gets_the_next_slot_whoever_queued_first() -> None:
    jobs = Jobs(slots := TenantSlots(lambda: 1))
    jobs.may_end.set()
    await asyncio.gather(*jobs.start(*"a" * 50, "b"))
    assert jobs.order.index("b") <= 1
    assert (slots.total, slots.waiting) == (0, 0)


async def test_tenants_with_equally_many_take_turns() -> None:
    jobs = Jobs(TenantSlots(lambda: 1))
    jobs.may_end.set()
    await asyncio.gather(*jobs.start(*"aaaabbbbcccc"))
    assert sorted(jobs.order[:3]) == sorted(jobs.order[3:6]) == ["a", "b", "c"]


async def test_a_share_leaves_slots_for_those_who_come_later() -> None:
    slots = TenantSlots(lambda: 16, share=3)
    assert sum(slots.try_take("a") for _ in range(40)) == 12
    assert sum(slots.try_take("b") for _ in range(40)) == 3
    assert sum(slots.try_take("c") for _ in range(40)) == 1
    assert not slots.try_take("d")
    slots.give_back("a")
    assert slots.try_take("d")


async def test_who_waits_goes_before_who_tries() -> None:
    jobs = Jobs(slots := TenantSlots(lambda: 1))
    assert slots.try_take("a")
    (task,) = jobs.start("b")
    await settled()
    slots.give_back("a")
    assert not slots.try_take("a")
    await settled()
    assert jobs.order == ["b"]
    jobs.may_end.set()
    await task


async def test_a_larger_capacity_is_noticed_without_an_event() -> None:
    capacity = [1]
    jobs = Jobs(TenantSlots(lambda: capacity[0]))
    tasks = jobs.start(*"aaa")
    await settled()
    assert len(jobs.order) == 1
    capacity[0] = 3
    await until_async("all three", lambda: len(jobs.order) == 3)
    jobs.may_end.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("moment", range(6))
async def test_a_job_that_is_cancelled_at_any_moment_loses_no_slot(moment: int) -> None:
    jobs = Jobs(slots := TenantSlots(lambda: 1))
    assert slots.try_take("a")
    task, other = jobs.start("b", "c")
    for step in range(6):
        if step == moment:
            task.cancel()
        if step == 3:
            slots.give_back("a")
        await asyncio.sleep(0)
    task.cancel()
    jobs.may_end.set()
    await asyncio.gather(task, return_exceptions=True)
    await other
    assert (slots.total, slots.waiting) == (0, 0)
