"""States of a worker, without a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from dynamo_vllm.admin.base import WorkerState
from dynamo_vllm.engine.base import EngineOp, Pause, Resume, Sleep, Wake
from dynamo_vllm.errors import EngineDead, EngineRequestFailed, NotListed, WrongState
from dynamo_vllm.serving.lifecycle import operations
from dynamo_vllm.serving.lifecycle import states as lifecycle_states
from dynamo_vllm.serving.lifecycle.operations import BoundedOperations
from dynamo_vllm.serving.lifecycle.states import Lifecycle, LifeParts
from harness.fakes import FakeContext, FakeWorker, make_worker, request

T = TypeVar("T")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no frontend here that must first hear of a drain."""
    monkeypatch.setattr(lifecycle_states, "SETTLE_SECONDS", 0.04)
    monkeypatch.setattr(lifecycle_states, "QUIET_SECONDS", 0.02)


class Discovery:
    def __init__(self, worker: FakeWorker) -> None:
        self.log: list[str] = []
        self.worker, self.adapters, self.engine = worker, Adapters(self), Engine(worker, self)
        self.is_there = True
        self.lets_go = True
        self.hangs: set[str] = set()
        self.goes_on = asyncio.Event()
        self.deaths: list[EngineDead] = []

    async def withdraw(self) -> bool:
        self.log.append("withdraw")
        return self.lets_go

    async def restore(self) -> bool:
        await self.reached("restore")
        return self.is_there

    async def remove(self) -> None:
        self.log.append("remove")

    async def reached(self, step: str) -> None:
        """Where it was told to hang, until `goes_on`."""
        self.log.append(step)
        if step in self.hangs:
            await self.goes_on.wait()

    def set_health_status(self, ready: bool) -> None:
        self.log.append("ready" if ready else "notready")


class Adapters:
    """Writes into the same log as discovery."""

    def __init__(self, discovery: Discovery) -> None:
        self.log = discovery.log
        self.reached = discovery.reached
        self.loading: str | None = None
        self.is_stuck = False

    async def withdraw_all(self) -> None:
        if self.is_stuck:
            await asyncio.Event().wait()
        await self.reached("withdraw adapters")

    async def close(self) -> None:
        await self.reached("close adapters")

    async def publish_all(self) -> None:
        self.log.append("publish adapters")

    async def add_all(self) -> None:
        self.log.append("add adapters")

    def changing(self) -> str | None:
        return self.loading


class Engine:
    """The fake engine's operations, in the log; the one in `fails` raises."""

    def __init__(self, worker: FakeWorker, discovery: Discovery) -> None:
        self.worker = worker
        self.log = discovery.log
        self.reached = discovery.reached
        self.fails: type[EngineOp] | None = None
        self.failure: Exception = EngineRequestFailed("told to fail")

    async def control(self, op: EngineOp) -> int | None:
        await self.reached(str(op))
        if self.fails is not None and isinstance(op, self.fails):
            raise self.failure
        await self.worker.engine.control(op)
        return 7 if isinstance(op, Sleep) else None


def state_of(life: Lifecycle) -> WorkerState:
    """Asked anew: a type checker takes an attribute to stay what it was."""
    return life.state


async def ready(sleep_refusal: str | None = None, **spec: Any) -> tuple[Lifecycle, Discovery]:
    """The life of a worker that serves, and an empty log of what it does from now on."""
    worker = await make_worker(**spec)
    discovery = Discovery(worker)

    async def answers() -> None:
        await discovery.reached("answers")

    parts = LifeParts(
        discovery=discovery,
        health=discovery,
        in_flight=worker.in_flight,
        engine=BoundedOperations(discovery.engine, discovery.deaths.append),
        adapters=discovery.adapters,
        answers=answers,
        sleep_refusal=sleep_refusal,
    )
    life = Lifecycle(parts)
    life.ready()
    assert discovery.log == ["ready"]
    discovery.log.clear()
    return life, discovery


async def reached(seen: Discovery, step: str) -> None:
    while step not in seen.log:
        await asyncio.sleep(0)


async def hanging(seen: Discovery, step: str, act: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The act under way, at a step that does not end."""
    seen.hangs.add(step)
    task = asyncio.create_task(act)
    await reached(seen, step)
    return task


AWAY = ["notready", "withdraw adapters", "withdraw"]
BACK = ["restore", "publish adapters", "ready"]
END = ["notready", "withdraw adapters", "remove", "close adapters"]


async def test_unwell_and_well_again() -> None:
    life, seen = await ready()
    await life.well()
    assert seen.log == [], "it is well"
    await life.unwell("hung")
    assert life.state is WorkerState.UNWELL
    await life.well()
    await life.well()
    assert seen.log == ["notready", "withdraw", *BACK]


async def test_worker_that_goes_on_hanging_asks_again_to_leave() -> None:
    """Discovery may not have let it go the first time."""
    life, seen = await ready()
    seen.lets_go = False
    await life.unwell("hung")
    await life.unwell("still hung")
    assert seen.log == ["notready", "withdraw", "withdraw"]
    assert life.state is WorkerState.UNWELL


async def test_not_ready_until_discovery_has_it_again() -> None:
    life, seen = await ready()
    await life.unwell("hung")
    seen.is_there = False
    await life.well()
    assert state_of(life) is WorkerState.UNWELL
    seen.is_there = True
    await life.well()
    assert life.state is WorkerState.READY


async def test_drain_lets_requests_finish_and_nothing_comes_back_after_it() -> None:
    life, seen = await ready(token_ms=1)
    running, sender = await seen.worker.begin(max_tokens=100)
    await life.drain(10)
    assert running.done() and len(sender.tokens) == 100
    await life.well()
    await life.drain(0)
    assert life.state is WorkerState.STOPPED
    assert seen.log == END


async def test_drain_budget_ends_what_is_left() -> None:
    life, seen = await ready(token_ms=50)
    running, _ = await seen.worker.begin()
    await life.drain(0)
    assert running.done() and running.exception() is not None
    assert seen.worker.engine.aborted == ["r1"]


async def test_drain_does_not_wait_for_an_adapter_that_is_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_states, "HIDE_SECONDS", 0.02)
    life, seen = await ready()
    seen.adapters.is_stuck = True
    await life.drain(0)
    assert (life.state, seen.log[-2:]) == (WorkerState.STOPPED, ["remove", "close adapters"])


@pytest.mark.parametrize(("level", "loads"), [(1, []), (2, ["add adapters"])])
async def test_sleep_leaves_first_and_wake_returns_last(level: int, loads: list[str]) -> None:
    """Adapters are loaded again after level 2."""
    life, seen = await ready()
    report = await life.sleep(level, 10)
    assert (life.state, report.freed_bytes, report.already) == (WorkerState.ASLEEP, 7, False)
    await life.wake()
    assert state_of(life) is WorkerState.READY
    assert seen.log == [*AWAY, f"Sleep(level={level})", "Wake()", *loads, "answers", *BACK]


async def test_sleep_and_wake_are_idempotent() -> None:
    life, seen = await ready()
    assert (await life.wake()).already
    await asyncio.gather(*(life.sleep(1, 10) for _ in range(5)))
    with pytest.raises(WrongState, match="is asleep; it can sleep only when it is ready"):
        await life.sleep(2, 10)
    assert seen.worker.engine.operations == [Sleep(1)]
    await asyncio.gather(*(life.wake() for _ in range(5)))
    assert seen.worker.engine.operations == [Sleep(1), Wake()]


@pytest.mark.parametrize("sleeps", [True, False])
async def test_sleep_and_pause_without_keep_let_requests_finish(sleeps: bool) -> None:
    life, seen = await ready(token_ms=1)
    running, sender = await seen.worker.begin(max_tokens=50)
    for is_again in (False, True):
        done = await (life.sleep(1, 10) if sleeps else life.pause(keep=False, drain_seconds=10))
        assert done.already is is_again
        assert running.done() and len(sender.tokens) == 50
    assert life.state is (WorkerState.ASLEEP if sleeps else WorkerState.PAUSED)


async def test_requests_beyond_the_budget_move_before_the_sleep() -> None:
    life, seen = await ready(token_ms=50)
    running, _ = await seen.worker.begin()
    await life.sleep(1, 0)
    assert running.done() and "is leaving" in str(running.exception())
    assert life.state is WorkerState.ASLEEP


async def test_late_request_moves_instead_of_waiting_for_the_wake() -> None:
    life, seen = await ready()
    await life.sleep(1, 10)
    with pytest.raises(Exception, match="asleep"):
        await asyncio.wait_for(seen.worker.generate(request(), FakeContext("late")), 30)
    await life.wake()
    assert len((await seen.worker.generate(request(), FakeContext("later"))).tokens) == 4


async def test_failed_sleep_or_pause_is_undone_and_puts_the_worker_back() -> None:
    for fails, steps in ((Sleep, ["Sleep(level=1)", "Wake()"]), (Pause, ["Pause()", "Resume()"])):
        life, seen = await ready()
        seen.engine.fails = fails
        with pytest.raises(EngineRequestFailed):
            await (life.sleep(1, 10) if fails is Sleep else life.pause(keep=True, drain_seconds=10))
        assert life.state is WorkerState.READY
        assert seen.log == [*AWAY, *steps, *BACK]


async def test_worker_that_discovery_does_not_let_go_does_not_sleep() -> None:
    """Frontends would go on sending it requests."""
    life, seen = await ready()
    seen.lets_go = False
    with pytest.raises(NotListed, match="did not remove this worker"):
        await life.sleep(1, 10)
    assert life.state is WorkerState.READY
    assert seen.log == [*AWAY, *BACK]


async def test_engine_that_hangs_while_it_falls_asleep_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SECONDS", 0.02)
    life, seen = await ready()
    seen.hangs.add("Sleep(level=1)")
    with pytest.raises(EngineDead, match=r"Sleep did not finish within 0.02 s"):
        await life.sleep(1, 10)
    assert len(seen.deaths) == 1, "also where nobody waits for the answer"
    assert seen.log == [*AWAY, "Sleep(level=1)"], "nothing is undone, and it does not come back"


async def test_engine_that_hangs_while_it_wakes_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "WAKE_SECONDS", 0.02)
    life, seen = await ready()
    await life.sleep(1, 10)
    seen.hangs.add("Wake()")
    with pytest.raises(EngineDead, match=r"Wake did not finish within 0.02 s"):
        await life.wake()
    assert len(seen.deaths) == 1 and "restore" not in seen.log


async def test_commands_do_not_queue_behind_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_states, "TURN_SECONDS", 0.02)
    life, seen = await ready()
    first = await hanging(seen, "Sleep(level=1)", life.sleep(1, 10))
    for act in (life.sleep(1, 10), life.wake(), life.pause(keep=True, drain_seconds=1)):
        with pytest.raises(WrongState, match="is falling asleep and busy with another command"):
            await act
    seen.goes_on.set()
    await first
    assert life.state is WorkerState.ASLEEP
    assert (await life.sleep(1, 10)).already


async def test_failed_wake_leaves_it_asleep_and_out_of_discovery() -> None:
    life, seen = await ready()
    await life.sleep(1, 10)
    seen.engine.fails = Wake
    with pytest.raises(EngineRequestFailed):
        await life.wake()
    assert state_of(life) is WorkerState.ASLEEP and "restore" not in seen.log
    seen.engine.fails = None
    await life.wake()
    assert life.state is WorkerState.READY


async def test_awake_worker_that_discovery_does_not_take_is_unwell_until_it_does() -> None:
    life, seen = await ready()
    await life.sleep(1, 10)
    seen.is_there = False
    with pytest.raises(NotListed, match="discovery did not list this worker again"):
        await life.wake()
    assert state_of(life) is WorkerState.UNWELL
    seen.is_there = True
    await life.well()
    assert life.state is WorkerState.READY


async def test_engine_that_wakes_and_does_not_answer_is_still_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_states, "ANSWER_SECONDS", 0.01)
    life, seen = await ready()
    await life.sleep(1, 10)
    seen.hangs.add("answers")
    with pytest.raises(WrongState, match=r"gave no answer within 0.01 s"):
        await life.wake()
    assert state_of(life) is WorkerState.ASLEEP and "restore" not in seen.log
    seen.hangs.clear()
    await life.wake()
    assert life.state is WorkerState.READY


async def test_sleep_is_refused_where_it_is_unsafe_and_while_an_adapter_loads() -> None:
    life, seen = await ready("its KV cache is lent")
    with pytest.raises(WrongState, match="must not sleep: its KV cache is lent"):
        await life.sleep(1, 10)
    assert seen.log == []
    life, seen = await ready()
    seen.adapters.loading = "sql"
    with pytest.raises(WrongState, match="'sql' is being loaded"):
        await life.sleep(1, 10)


async def test_asleep_worker_is_not_asked_and_can_drain() -> None:
    life, seen = await ready()
    before = life.is_watched
    await life.sleep(1, 10)
    assert (before, life.is_watched) == (True, False)
    await life.unwell("a hang that is none")
    assert state_of(life) is WorkerState.ASLEEP
    await life.drain(0)
    assert life.state is WorkerState.STOPPED
    assert seen.log[-4:] == END


@pytest.mark.parametrize("is_drained", [False, True])
async def test_paused_requests_stand_still_and_go_on_when_resumed_or_drained(is_drained: bool) -> None:
    life, seen = await ready(token_ms=1)
    running, sender = await seen.worker.begin(max_tokens=100)
    await life.pause(keep=True, drain_seconds=10)
    before = len(sender.tokens)
    with pytest.raises(Exception, match="paused"):
        await seen.worker.generate(request(), FakeContext("late"))
    assert len(sender.tokens) == before < 100
    await (life.drain(10) if is_drained else life.resume())
    await asyncio.wait_for(running, 30)
    assert len(sender.tokens) == 100
    assert seen.worker.engine.operations == [Pause(), Resume()]


async def test_sleep_goes_on_when_whoever_asked_is_gone() -> None:
    """Half way it would come back into discovery with an engine that sleeps."""
    life, seen = await ready()
    asking = await hanging(seen, "Sleep(level=1)", life.sleep(1, 10))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    seen.goes_on.set()
    assert (await life.sleep(1, 10)).already, "it waits for the one under way"
    assert life.state is WorkerState.ASLEEP and "restore" not in seen.log


# --- the end comes meanwhile ------------------------------------------------------------------------------


async def test_drain_does_not_wait_for_a_sleep_that_waits_for_requests() -> None:
    life, seen = await ready(token_ms=50)
    running, _ = await seen.worker.begin(max_tokens=900)
    falling = asyncio.create_task(life.sleep(1, 3600))
    queued = asyncio.create_task(life.pause(keep=False, drain_seconds=3600))
    await reached(seen, "withdraw adapters")
    await asyncio.wait_for(life.drain(0.1), 30)
    for act in (falling, queued):
        with pytest.raises(WrongState, match="this worker is stopping"):
            await act
    with pytest.raises(Exception, match="is leaving"):
        await running
    assert life.state is WorkerState.STOPPED
    assert "restore" not in seen.log and seen.worker.engine.operations == []


@pytest.mark.parametrize("step", ["Wake()", "answers"])
async def test_drain_does_not_wait_for_a_wake_that_hangs(step: str) -> None:
    life, seen = await ready()
    await life.sleep(1, 10)
    waking = await hanging(seen, step, life.wake())
    await asyncio.wait_for(life.drain(0.1), 30)
    with pytest.raises(WrongState, match="this worker is stopping"):
        await waking
    assert life.state is WorkerState.STOPPED and "restore" not in seen.log and seen.deaths == []


async def test_drain_lets_an_engine_go_on_that_was_about_to_pause() -> None:
    """Its requests would stand still until the budget is used up."""
    life, seen = await ready()
    pausing = await hanging(seen, "Pause()", life.pause(keep=True, drain_seconds=10))
    await asyncio.wait_for(life.drain(0.1), 30)
    with pytest.raises(WrongState, match="this worker is stopping"):
        await pausing
    assert "Resume()" in seen.log and life.state is WorkerState.STOPPED


async def test_drain_while_a_failed_sleep_comes_back() -> None:
    life, seen = await ready()
    seen.engine.fails = Sleep
    asking = await hanging(seen, "restore", life.sleep(1, 10))
    await asyncio.wait_for(life.drain(0.1), 30)
    seen.goes_on.set()
    with pytest.raises(WrongState, match="this worker is stopping"):
        await asking
    if orphans := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(orphans)
    assert life.state is WorkerState.STOPPED
    assert seen.log[seen.log.index("restore") + 1 :] == END


async def test_drain_while_a_worker_that_was_unwell_comes_back() -> None:
    life, seen = await ready()
    await life.unwell("hung")
    returning = await hanging(seen, "restore", life.well())
    draining = asyncio.create_task(life.drain(0.1))
    await asyncio.sleep(0)
    seen.goes_on.set()
    await asyncio.gather(returning, draining)
    assert "ready" not in seen.log and "remove" in seen.log[seen.log.index("restore") :]


async def test_drain_does_not_wait_for_adapters_beyond_its_budget() -> None:
    life, seen = await ready()
    seen.hangs.add("close adapters")
    await asyncio.wait_for(life.drain(0.1), 30)
    assert life.state is WorkerState.STOPPED


async def test_drain_of_a_paused_worker_whose_engine_died() -> None:
    life, seen = await ready()
    await life.pause(keep=True, drain_seconds=10)
    seen.engine.fails, seen.engine.failure = Resume, EngineDead("gone")
    await life.drain(0)
    assert life.state is WorkerState.STOPPED


async def test_dead_engine_does_not_come_back_into_discovery() -> None:
    life, seen = await ready(die_after=0)
    with pytest.raises(Exception, match="set to die"):
        await seen.worker.generate(request())
    with pytest.raises(EngineDead):
        await life.sleep(1, 10)
    assert "restore" not in seen.log
