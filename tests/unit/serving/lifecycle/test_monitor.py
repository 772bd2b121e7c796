"""The engine's watch over the fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.engine.process.activity import Vitals
from dynamo_vllm.errors import EngineDead
from dynamo_vllm.job import Job, SamplingSpec
from dynamo_vllm.serving.lifecycle import monitor as monitoring
from dynamo_vllm.serving.lifecycle.monitor import Monitor
from harness.fakes import make_worker, request
from harness.waiting import until_async


async def canary(job_id: str, rank: int) -> Job:
    return Job(job_id, [1], SamplingSpec(max_tokens=1), data_parallel_rank=rank)


class Watch:
    """A monitor at work, and what it has reported."""

    def __init__(self, engine: FakeEngine, *is_watched: Callable[[], bool], **seconds: float) -> None:
        self.hung, self.answered = asyncio.Event(), asyncio.Event()
        self.reason = ""
        times: dict[str, Any] = {
            "health": 0.01,
            "canary": 0.05,
            "canary_timeout": 0.1,
            "step": 600.0,
            **seconds,
        }
        self.monitor = Monitor(
            engine,
            canary,
            self.hang,
            self.answer,
            *is_watched,
            **{f"{name}_seconds": value for name, value in times.items()},
        )
        self.task = asyncio.create_task(self.monitor.run())

    async def hang(self, reason: str) -> None:
        self.reason = reason
        self.hung.set()

    async def answer(self) -> None:
        self.answered.set()


@pytest.fixture
async def watch() -> AsyncIterator[Callable[..., Watch]]:
    watches: list[Watch] = []

    def start(*args: Any, **settings: Any) -> Watch:
        watches.append(Watch(*args, **settings))
        return watches[-1]

    yield start
    for started in watches:
        started.task.cancel()
    await asyncio.gather(*(started.task for started in watches), return_exceptions=True)


Start = Callable[..., Watch]


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 30)


async def test_hung_engine_is_reported_and_comes_back(watch: Start) -> None:
    worker = await make_worker(stall_on_token=1)
    seen = watch(worker.engine)
    await soon(seen.hung)
    assert not seen.answered.is_set()
    await worker.engine.abort("canary-1")  # lets the stalled canary end, as a resumed engine would
    await soon(seen.answered)


async def test_dead_engine_ends_the_watch(watch: Start) -> None:
    seen = watch((await make_worker(die_after=0)).engine)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(seen.task, 30)


async def test_busy_engine_is_not_asked_and_an_idle_one_is(watch: Start) -> None:
    worker = await make_worker(token_ms=1)
    seen = watch(worker.engine)
    await worker.generate(request(max_tokens=100))
    assert not seen.answered.is_set()
    await soon(seen.answered)
    assert not seen.hung.is_set()


async def test_hang_of_one_rank_is_seen_while_the_other_answers(watch: Start) -> None:
    worker = await make_worker(ranks=2, stall_rank=1)
    seen = watch(worker.engine)
    await soon(seen.hung)
    assert seen.reason.startswith("rank 1 of the engine produced no output")
    seen.answered.clear()  # before the hang counted as one, the other rank's answers were the engine's
    other = worker.engine.outputs_seen()[0]
    await until_async("the other rank", lambda: worker.engine.outputs_seen()[0] >= other + 2)
    assert not seen.answered.is_set(), "the other rank's answer does not bring the worker back"
    for job_id in set(worker.engine.running):
        await worker.engine.abort(job_id)
    await soon(seen.answered)


async def test_busy_rank_does_not_hide_an_idle_one(watch: Start) -> None:
    worker = await make_worker(ranks=2, stall_rank=1, token_ms=1)
    seen = watch(worker.engine)
    busy = asyncio.create_task(worker.generate(request(max_tokens=4000)))
    await soon(seen.hung)
    assert not busy.done()
    busy.cancel()


async def test_engine_that_stands_still_on_purpose_is_not_asked(watch: Start) -> None:
    worker, is_watched, looks = await make_worker(stall_on_token=1), False, 0

    def looked() -> bool:
        nonlocal looks
        looks += 1
        return is_watched or looks == 1

    seen = watch(worker.engine, looked)
    await until_async("many looks", lambda: looks >= 30)  # twice what a hang takes to be seen
    assert not seen.hung.is_set()
    is_watched = True
    await soon(seen.hung)


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


async def test_slow_step_is_no_hang_and_one_that_stands_still_is(
    caplog: pytest.LogCaptureFixture, watch: Start
) -> None:
    engine = Working()
    seen = watch(engine)
    await engine.looked(30)  # a quarter of a second and more: twice what a canary may take
    assert not seen.hung.is_set() and engine.running
    assert caplog.text.count("slow, not hung") == 1
    engine.is_computing = False
    await soon(seen.hung)
    assert "used no processor time" in seen.reason
    assert not seen.answered.is_set()
    await engine.abort("canary-1")
    await soon(seen.answered)


async def test_deadlock_is_not_called_slow_first(caplog: pytest.LogCaptureFixture, watch: Start) -> None:
    engine = Working()
    engine.is_computing = False
    await soon(watch(engine).hung)
    assert "slow" not in caplog.text


async def test_step_without_end_is_a_hang_however_busy(watch: Start) -> None:
    seen = watch(Working(), step=0.2)
    await soon(seen.hung)
    assert "--step-seconds" in seen.reason


async def test_engine_that_cannot_be_looked_at_is_judged_by_its_silence(watch: Start) -> None:
    engine = Working()
    engine.can_be_read = False  # as with a driver that hangs
    await soon(watch(engine).hung)
    assert engine.looks == 1, "nobody else is kept by it"


def stand_still(seconds: float) -> None:
    """With the loop, and with it the watch."""
    time.sleep(seconds)


async def test_worker_that_stood_still_itself_does_not_blame_the_engine(
    monkeypatch: pytest.MonkeyPatch, watch: Start
) -> None:
    monkeypatch.setattr(monitoring, "LATE_SECONDS", 0.05)
    worker = await make_worker(stall_on_token=1)
    seen = watch(worker.engine, canary_timeout=0.2)
    await until_async("a request", lambda: worker.engine.running)
    stand_still(0.3)
    await asyncio.sleep(0.02)  # long enough for a look
    assert not seen.hung.is_set()
    await soon(seen.hung)
