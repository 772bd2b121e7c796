"""States of a worker, without a runtime."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamo_vllm.serving import lifecycle
from dynamo_vllm.serving.lifecycle import Lifecycle, State
from harness.fakes import FakeSender, FakeWorker, make_worker, request


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no frontend here that must first hear of a drain."""
    monkeypatch.setattr(lifecycle, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(lifecycle, "QUIET_SECONDS", 0.05)


class Discovery:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_there = True

    async def withdraw(self) -> None:
        self.log.append("withdraw")

    async def restore(self) -> bool:
        self.log.append("restore")
        return self.is_there

    async def remove(self) -> None:
        self.log.append("remove")

    def set_health_status(self, ready: bool) -> None:
        self.log.append("ready" if ready else "notready")


def made(worker: FakeWorker) -> tuple[Lifecycle, Discovery]:
    discovery = Discovery()
    return Lifecycle(discovery, discovery, worker.in_flight), discovery


async def test_unwell_and_well_again() -> None:
    life, seen = made(await make_worker())
    life.ready()
    await life.unwell("hung")
    await life.unwell("still hung")
    assert life.state is State.UNWELL
    await life.well()
    await life.well()
    assert seen.log == ["ready", "notready", "withdraw", "restore", "ready"]


async def test_not_ready_until_discovery_has_it_again() -> None:
    life, seen = made(await make_worker())
    life.ready()
    await life.unwell("hung")
    seen.is_there = False
    await life.well()
    assert life.state is State.UNWELL
    seen.is_there = True
    await life.well()
    assert life.state is State.READY


async def test_well_before_unwell_does_nothing() -> None:
    life, seen = made(await make_worker())
    life.ready()
    await life.well()
    assert seen.log == ["ready"]


async def test_drain_lets_requests_finish() -> None:
    worker = await make_worker(token_ms=1)
    life, seen = made(worker)
    life.ready()
    sender = FakeSender()
    running = asyncio.create_task(worker.generate(request(max_tokens=100), sender=sender))
    await sender.first.wait()
    await life.drain(10)
    assert running.done() and len(sender.tokens) == 100
    assert life.state is State.STOPPED
    assert seen.log == ["ready", "notready", "remove"]


async def test_drain_budget_ends_what_is_left() -> None:
    worker = await make_worker(token_ms=50)
    life, _ = made(worker)
    life.ready()
    sender = FakeSender()
    running = asyncio.create_task(worker.generate(request(max_tokens=4000), sender=sender))
    await sender.first.wait()
    began = time.monotonic()
    await life.drain(0)
    assert time.monotonic() - began < 3
    assert running.done() and running.exception() is not None
    assert worker.engine.aborted == ["r1"]


async def test_nothing_comes_back_after_a_drain() -> None:
    life, seen = made(await make_worker())
    life.ready()
    await life.drain(0)
    await life.well()
    await life.drain(0)
    assert life.state is State.STOPPED
    assert seen.log.count("remove") == 1
