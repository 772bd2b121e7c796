"""Ends of requests reach the limits soon, and none is lost while the database is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from dynamo_vllm.gateway.control import endings as module
from dynamo_vllm.gateway.control.endings import Endings
from dynamo_vllm.gateway.heartbeats import SILENT_SECONDS, Heartbeats
from dynamo_vllm.gateway.store.limits import Admitted, Limiter, Refused
from harness.gateway_store import DEFAULT, Store, with_limits
from harness.waiting import until_async


@contextlib.asynccontextmanager
async def running(store: Store, limits: Limiter | None = None) -> AsyncIterator[Endings]:
    endings = Endings(limits or store.limiter, "g1", lambda: None)
    task = asyncio.ensure_future(endings.run())
    yield endings
    task.cancel()


async def until_open(store: Store, count: int) -> None:
    def seats() -> int:
        row = store.database.run_now(lambda t: t.one("SELECT running FROM gateway_counters"))
        return int(row[0]) if row else 0

    await until_async("the ends", lambda: seats() == count)


async def test_a_client_with_one_seat_sends_one_request_after_the_other(store: Store) -> None:
    limits, key = Limiter(store.database, "g1", seat_seconds=60.0), with_limits(concurrent=1)
    async with running(store, limits) as endings:
        for number in range(10):
            assert isinstance(await limits.admit(f"r{number}", key, DEFAULT, 1), Admitted)
            endings.ended(f"r{number}")


async def test_an_end_is_told_again_until_the_database_has_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_SECONDS", 0.001)
    key = with_limits(concurrent=3)
    for name in ("r1", "r2", "r3"):
        await store.limiter.admit(name, key, DEFAULT, 1)
    store.database.run_now(lambda t: t.execute("ALTER TABLE gateway_counters RENAME TO away"))
    tries: list[object] = []
    settle = store.limiter.ended

    async def counted(names: list[str]) -> None:
        tries.append(names)
        await settle(names)

    monkeypatch.setattr(store.limiter, "ended", counted)
    async with running(store) as endings:
        endings.ended("r1")
        endings.unused("r2")
        await until_async("three tries", lambda: len(tries) >= 3)
        store.database.run_now(lambda t: t.execute("ALTER TABLE away RENAME TO gateway_counters"))
        await until_open(store, 1)


async def test_a_killed_envoy_gives_all_seats_back_but_those_of_deferred_requests(store: Store) -> None:
    key = with_limits(concurrent=2)
    deferred = Limiter(store.database, "process-1")
    await store.limiter.admit("r1", key, DEFAULT, 1)
    await deferred.admit("r2", key, DEFAULT, 1, is_deferred=True)
    async with running(store) as endings:
        endings.all_lost()
        await until_open(store, 1)
        assert isinstance(await store.limiter.admit("r3", key, DEFAULT, 1), Admitted)
        assert isinstance(await store.limiter.admit("r4", key, DEFAULT, 1), Refused)


def test_a_loop_that_stops_beating_is_named() -> None:
    now = [0.0]
    heartbeats = Heartbeats(lambda: now[0])
    heartbeats.beat("keys")
    heartbeats.beat("upkeep", 10.0)
    now[0] = SILENT_SECONDS + 1
    assert heartbeats.stopped() == ["keys"]
    heartbeats.beat("keys")
    now[0] += 10
    assert heartbeats.stopped() == ["upkeep"]
