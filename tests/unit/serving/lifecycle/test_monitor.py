"""The engine's watch over the fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import pytest

from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.engine.process.activity import Vitals
from dynamo_vllm.errors import EngineDead
from dynamo_vllm.job import Job, SamplingSpec
from dynamo_vllm.serving.lifecycle import monitor as monitoring
from dynamo_vllm.serving.lifecycle.monitor import Monitor
from harness.fakes import FakeWorker, make_worker, request
from harness.waiting import until_async


async def canary(job_id: str, rank: int) -> Job:
    return Job(job_id, [1], SamplingSpec(max_tokens=1), data_parallel_rank=rank)


class Seen:
    def __init__(self) -> None:
        self.hung, self.answered = asyncio.Event(), asyncio.Event()
        self.reason = ""

    async def hang(self, reason: str) -> None:
        self.reason = reason
        self.hung.set()

    async def answer(self) -> None:
        self.answered.set()


def watch(
    worker: FakeWorker | FakeEngine, canary_timeout_seconds: float = 0.1, step_seconds: float = 600
) -> tuple[Seen, asyncio.Task[None]]:
    seen = Seen()
    monitor = Monitor(
        worker.engine if isinstance(worker, FakeWorker) else worker,
        canary,
        seen.hang,
        seen.answer,
        health_seconds=0.01,
        canary_seconds=0.05,
        canary_timeout_seconds=canary_timeout_seconds,
        step_seconds=step_seconds,
    )
    return seen, asyncio.create_task(monitor.run())


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_idle_engine_is_asked_and_answers() -> None:
    worker = await make_worker()
    seen, task = watch(worker)
    await asyncio.wait_for(seen.answered.wait(), 30)
    assert not seen.hung.is_set()
    await stop(task)


async def test_hung_engine_is_reported_and_comes_back() -> None:
    worker = await make_worker(stall_on_token=1)
    seen, task = watch(worker)
    await asyncio.wait_for(seen.hung.wait(), 30)
    assert not seen.answered.is_set()
    await worker.engine.abort("canary-1")  # lets the stalled canary end, as a resumed engine would
    await asyncio.wait_for(seen.answered.wait(), 30)
    await stop(task)


async def test_dead_engine_ends_the_watch() -> None:
    worker = await make_worker(die_after=0)
    _, task = watch(worker)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(task, 30)


async def test_busy_engine_is_not_asked() -> None:
    worker = await make_worker(token_ms=1)
    seen, task = watch(worker)
    await worker.generate(request(max_tokens=150))
    assert not seen.answered.is_set() and not seen.hung.is_set()
    await stop(task)


async def test_hang_of_one_rank_is_seen_while_the_other_answers() -> None:
    worker = await make_worker(ranks=2, stall_rank=1)
    seen, task = watch(worker)
    await asyncio.wait_for(seen.hung.wait(), 30)
    assert seen.reason.startswith("rank 1 of the engine produced no output")
    seen.answered.clear()  # before the hang counted as one, the other rank's answers were the engine's
    other = worker.engine.outputs_seen()[0]
    await until_async("the other rank", lambda: worker.engine.outputs_seen()[0] >= other + 2)
    assert not seen.answered.is_set(), "the other rank's answer does not bring the worker back"
    stalled = set(worker.engine.running)
    for job_id in stalled:
        await worker.engine.abort(job_id)
    await asyncio.wait_for(seen.answered.wait(), 30)
    await stop(task)


async def test_busy_rank_does_not_hide_an_idle_one() -> None:
    worker = await make_worker(ranks=2, stall_rank=1, token_ms=1)
    seen, task = watch(worker)
    busy = asyncio.create_task(worker.generate({**request(max_tokens=4000), "routing": {"dp_rank": 0}}))
    await asyncio.wait_for(seen.hung.wait(), 30)
    assert not busy.done()
    busy.cancel()
    await stop(task)


async def test_engine_that_stands_still_on_purpose_is_not_asked() -> None:
    worker = await make_worker(stall_on_token=1)
    seen, is_watched = Seen(), False
    monitor = Monitor(
        worker.engine,
        canary,
        seen.hang,
        seen.answer,
        lambda: is_watched,
        health_seconds=0.01,
        canary_seconds=0.05,
        canary_timeout_seconds=0.1,
        step_seconds=600,
    )
    is_watched = True
    await monitor.look()
    is_watched = False
    task = asyncio.create_task(monitor.run())
    await asyncio.sleep(0.3)  # twice what a hang takes to be seen
    assert not seen.hung.is_set()
    is_watched = True
    await asyncio.wait_for(seen.hung.wait(), 30)
    await stop(task)


class Working(FakeEngine):
    """In a step that does not end; one with a process of its own, as it seems."""

    def __init__(self) -> None:
        super().__init__(FakeSpec(stall_on_token=1), lambda figures: None)
        self.looks = 0
        self.is_computing = self.can_be_read = True
        self._cpu_seconds = 0.0

    async def vitals(self) -> Mapping[int, Vitals]:
        self.looks += 1
        if not self.can_be_read:
            await asyncio.Event().wait()
        self._cpu_seconds += self.is_computing
        return {0: Vitals(self._cpu_seconds)}

    async def looked(self, times: int) -> None:
        wanted = self.looks + times
        await until_async(f"{times} looks", lambda: self.looks >= wanted)


async def test_slow_step_is_no_hang_and_one_that_stands_still_is(caplog: pytest.LogCaptureFixture) -> None:
    engine = Working()
    seen, task = watch(engine)
    await engine.looked(30)  # a quarter of a second and more: twice what a canary may take
    assert not seen.hung.is_set() and engine.running
    assert caplog.text.count("slow, not hung") == 1
    engine.is_computing = False
    await asyncio.wait_for(seen.hung.wait(), 30)
    assert "used no processor time" in seen.reason
    assert not seen.answered.is_set()
    await engine.abort("canary-1")
    await asyncio.wait_for(seen.answered.wait(), 30)
    await stop(task)


async def test_deadlock_is_not_called_slow_first(caplog: pytest.LogCaptureFixture) -> None:
    engine = Working()
    engine.is_computing = False
    seen, task = watch(engine)
    await asyncio.wait_for(seen.hung.wait(), 30)
    assert "slow" not in caplog.text
    await stop(task)


async def test_step_without_end_is_a_hang_however_busy() -> None:
    seen, task = watch(Working(), step_seconds=0.3)
    await asyncio.wait_for(seen.hung.wait(), 30)
    assert "--step-seconds" in seen.reason
    await stop(task)


async def test_engine_that_cannot_be_looked_at_is_judged_by_its_silence() -> None:
    engine = Working()
    engine.can_be_read = False  # as with a driver that hangs
    seen, task = watch(engine)
    await asyncio.wait_for(seen.hung.wait(), 30)
    assert engine.looks == 1, "nobody else is kept by it"
    await stop(task)


def stand_still(seconds: float) -> None:
    """With the loop, and with it the watch."""
    time.sleep(seconds)


async def test_worker_that_stood_still_itself_does_not_blame_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring, "LATE_SECONDS", 0.05)
    worker = await make_worker(stall_on_token=1)
    seen, task = watch(worker, canary_timeout_seconds=0.2)
    await until_async("a request", lambda: worker.engine.running)
    stand_still(0.3)
    await asyncio.sleep(0.02)  # long enough for a look
    assert not seen.hung.is_set()
    await asyncio.wait_for(seen.hung.wait(), 30)
    await stop(task)
