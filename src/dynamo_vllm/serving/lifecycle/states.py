"""Holds the state of a worker and runs the transitions between states, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.admin.base import StateChange, WorkerState
from dynamo_vllm.engine.base import Pause, Resume, Sleep, Wake
from dynamo_vllm.errors import EngineDead, EngineError, EngineRequestFailed, NotListed, WrongState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from dynamo_vllm.serving.lifecycle.operations import Controlled
    from dynamo_vllm.serving.request.cancel import InFlight

logger = logging.getLogger(__name__)

# A frontend may have chosen this worker just before it learnt that the worker leaves.
SETTLE_SECONDS = 1.0
QUIET_SECONDS = 0.3
ABORT_SECONDS = 3.0
ANSWER_SECONDS = 120.0
"""Longest time for an engine's first answer after a sleep."""
HIDE_SECONDS = 5.0
TURN_SECONDS = 15.0
"""How long an operator's command waits for another one; a thread of the system port waits with it."""
_POLL_SECONDS = 0.02


class Discovery(Protocol):
    async def withdraw(self) -> bool:
        """Return whether the worker left discovery; if not, a later call tries again."""

    async def restore(self) -> bool: ...

    async def remove(self) -> None: ...


class Health(Protocol):
    """The part of the runtime that answers /health."""

    def set_health_status(self, ready: bool) -> None: ...


class Adapters(Protocol):
    """The loaded LoRA adapters, which are listed and withdrawn with the worker."""

    async def withdraw_all(self) -> object: ...

    async def publish_all(self) -> object: ...

    async def add_all(self) -> object:
        """Load them into the engine again."""

    async def close(self) -> None:
        """Stop running loads and withdraw the adapters."""

    def changing(self) -> str | None:
        """Return the name of an adapter that is being loaded or unloaded."""


@dataclass(frozen=True, slots=True)
class LifeParts:
    """The parts of a worker that its states act on."""

    discovery: Discovery
    health: Health
    in_flight: InFlight
    engine: Controlled
    adapters: Adapters
    answers: Callable[[], Awaitable[None]]
    """Return when the engine has answered a small job."""
    sleep_refusal: str | None = None


class Lifecycle:
    """STARTING → READY ⇄ UNWELL, ASLEEP, PAUSED → DRAINING → STOPPED; READY means that requests work."""

    def __init__(self, parts: LifeParts) -> None:
        self._parts = parts
        self._in_flight = parts.in_flight
        self._turn = asyncio.Lock()
        self._commands: set[asyncio.Task[StateChange]] = set()
        self._is_ending = False
        self._level = 0
        self.state = WorkerState.STARTING

    def ready(self) -> None:
        """Unless the worker is stopping: then remove what was listed in the meantime."""
        if not self._is_ending:
            self.state = WorkerState.READY
            self._parts.health.set_health_status(True)

    @property
    def is_watched(self) -> bool:
        """Return whether the engine can answer: a paused or sleeping one cannot, and is not hung."""
        return self.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.UNWELL)

    async def unwell(self, reason: str) -> None:
        """Leave routing until `well`; running requests continue as far as the engine lets them."""
        async with self._turn:
            if self.state is WorkerState.READY:
                logger.error("taken out of service: %s", reason)
                self.state = WorkerState.UNWELL
                self._parts.health.set_health_status(False)
            if self.state is WorkerState.UNWELL:
                # Again at each check, if discovery did not remove the worker.
                await self._parts.discovery.withdraw()

    async def well(self) -> None:
        async with self._turn:
            if self.state is WorkerState.UNWELL:
                await self._return()

    async def _return(self) -> bool:
        """Return whether the worker is listed again; if not it stays unwell, and each canary tries again."""
        if self._is_ending:
            return False
        self._in_flight.open()
        if not await self._parts.discovery.restore():
            self.state = WorkerState.UNWELL
            return False
        await self._parts.adapters.publish_all()
        self.ready()
        logger.info("back in service")
        return True

    async def _hide_adapters(self) -> None:
        """Before the worker itself: a frontend fails requests for an adapter whose worker it does not see."""
        try:
            async with asyncio.timeout(HIDE_SECONDS):
                await self._parts.adapters.withdraw_all()
        except TimeoutError:
            logger.warning("adapters are still listed after %.0f s; leaving anyway", HIDE_SECONDS)

    # --- sleep and pause -------------------------------------------------------------------------------

    async def sleep(self, level: int, drain_seconds: float) -> StateChange:
        """Leave discovery, let requests finish, free the engine's memory."""
        return await self._run_command(lambda: self._sleep(level, drain_seconds))

    async def wake(self) -> StateChange:
        """Wake the engine first, and enter discovery only when it answers."""
        return await self._run_command(self._wake)

    async def pause(self, keep: bool, drain_seconds: float) -> StateChange:
        """Leave discovery and stop computing; `keep` freezes requests instead of finishing them."""
        return await self._run_command(lambda: self._pause(keep, drain_seconds))

    async def resume(self) -> StateChange:
        return await self._run_command(self._resume)

    async def _run_command(self, act: Callable[[], Awaitable[StateChange]]) -> StateChange:
        """Run in a separate task: the caller may disconnect, and only shutdown interrupts it."""
        if self._is_ending:
            raise WrongState("this worker is stopping")
        task = asyncio.create_task(self._run_exclusive(act))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise WrongState("this worker is stopping") from None
            raise

    async def _run_exclusive(self, act: Callable[[], Awaitable[StateChange]]) -> StateChange:
        """Run one operator command at a time; others wait for short ones."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise WrongState(
                f"this worker is {self.state.value} and busy with another command; try again later"
            ) from None
        try:
            return await act()
        finally:
            self._turn.release()

    async def _sleep(self, level: int, drain_seconds: float) -> StateChange:
        if self.state is WorkerState.ASLEEP and level == self._level:
            return StateChange(already=True)
        self._require("sleep", WorkerState.READY)
        if self._parts.sleep_refusal is not None:
            raise WrongState(f"this worker must not sleep: {self._parts.sleep_refusal}")
        began = time.monotonic()
        async with self._out_of_service(WorkerState.FALLING_ASLEEP):
            await self._drain_requests(began, drain_seconds)
            freed = await self._stop_engine(Sleep(level), Wake())
        self.state, self._level = WorkerState.ASLEEP, level
        report = StateChange(seconds=time.monotonic() - began, freed_bytes=freed)
        logger.info("asleep at level %d after %.1f s, %s bytes freed", level, report.seconds, freed)
        return report

    async def _wake(self) -> StateChange:
        if self.state is WorkerState.READY:
            return StateChange(already=True)
        self._require("wake up", WorkerState.ASLEEP)
        began = time.monotonic()
        await self._parts.engine.control(Wake())
        if self._level == 2:
            await self._parts.adapters.add_all()
        await self._wait_for_answer()
        await self._return_or_raise("awake")
        logger.info("awake after %.1f s", time.monotonic() - began)
        return StateChange(seconds=time.monotonic() - began)

    async def _pause(self, keep: bool, drain_seconds: float) -> StateChange:
        if self.state is WorkerState.PAUSED:
            return StateChange(already=True)
        self._require("pause", WorkerState.READY)
        began = time.monotonic()
        async with self._out_of_service(WorkerState.PAUSING):
            if not keep:
                await self._drain_requests(began, drain_seconds)
            self._in_flight.close("this worker is paused")
            await self._stop_engine(Pause(), Resume())
        self.state = WorkerState.PAUSED
        logger.info("paused with %d requests", len(self._in_flight))
        return StateChange(seconds=time.monotonic() - began)

    async def _resume(self) -> StateChange:
        if self.state is WorkerState.READY:
            return StateChange(already=True)
        self._require("resume", WorkerState.PAUSED)
        began = time.monotonic()
        await self._parts.engine.control(Resume())
        await self._return_or_raise("resumed")
        return StateChange(seconds=time.monotonic() - began)

    def _require(self, verb: str, state: WorkerState) -> None:
        if self.state is not state:
            raise WrongState(
                f"this worker is {self.state.value}; it can {verb} only when it is {state.value}"
            )
        if (name := self._parts.adapters.changing()) is not None:
            raise WrongState(f"adapter {name!r} is being loaded or unloaded; try again when that is done")

    @contextlib.asynccontextmanager
    async def _out_of_service(self, state: WorkerState) -> AsyncIterator[None]:
        """Leave discovery; return if the next step fails."""
        self.state = state
        self._parts.health.set_health_status(False)
        try:
            await self._hide_adapters()
            if not await self._parts.discovery.withdraw():
                raise NotListed("discovery did not remove this worker, so it stays in service; try again")
            yield
        except EngineDead:  # there is nothing to return with
            raise
        except Exception:
            await self._return()
            raise

    async def _drain_requests(self, began: float, budget_seconds: float) -> None:
        """Wait until nothing is in flight and nothing can arrive; requests over the deadline move on."""
        if not await self._empty(began, budget_seconds):
            raise WrongState(f"{len(self._in_flight)} requests did not end; try again later")
        self._in_flight.close("this worker is asleep")

    async def _stop_engine(self, op: Sleep | Pause, undo: Wake | Resume) -> int | None:
        """An engine that failed may have stopped half way: resume it before requests come again."""
        try:
            return await self._parts.engine.control(op)
        except EngineRequestFailed:
            with contextlib.suppress(EngineRequestFailed):
                await self._parts.engine.control(undo)
            raise

    async def _wait_for_answer(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS) as limit:
                await self._parts.answers()
        except TimeoutError:
            if not limit.expired():
                raise
            raise WrongState(
                f"the engine gave no answer within {ANSWER_SECONDS:g} s after waking; "
                "wake it again, or restart the worker"
            ) from None

    async def _return_or_raise(self, what: str) -> None:
        if not await self._return():
            raise NotListed(f"{what}, but discovery did not list this worker again; it keeps trying")

    # --- the end ---------------------------------------------------------------------------------------

    async def drain(self, budget_seconds: float, *, settles: bool = True) -> None:
        """Leave discovery, let requests finish within the drain time, and move the rest to other workers.

        `settles`: for a moment requests may come from frontends that have not noticed yet.
        """
        if self._is_ending:
            return
        self._is_ending = True
        for act in self._commands:
            act.cancel()
        async with self._turn:
            is_paused = self.state in (WorkerState.PAUSING, WorkerState.PAUSED)
            self.state = WorkerState.DRAINING
        began = time.monotonic()
        self._parts.health.set_health_status(False)
        await self._hide_adapters()
        await self._parts.discovery.remove()
        try:
            async with asyncio.timeout(max(budget_seconds, SETTLE_SECONDS)):
                if is_paused:
                    await self._parts.engine.control(Resume())
                await self._parts.adapters.close()
        except (EngineError, TimeoutError) as exc:
            logger.warning("draining continues without the engine or the adapters: %s", exc or "no answer")
        await self._empty(began, budget_seconds, settles=settles)
        self.state = WorkerState.STOPPED
        logger.info("drained in %.1f s", time.monotonic() - began)

    async def _empty(self, began: float, budget_seconds: float, *, settles: bool = True) -> bool:
        """Return whether nothing is in flight: finished in time, or moved to other workers."""
        settle_seconds = SETTLE_SECONDS if settles else 0
        logger.info("draining %d requests, %.0f s at most", len(self._in_flight), budget_seconds)
        if await self._wait_until_idle(began + settle_seconds, began + max(budget_seconds, settle_seconds)):
            return True
        logger.warning("the drain time is over: %d requests move to other workers", len(self._in_flight))
        self._in_flight.abort_all()
        return await self._wait_until_idle(0, time.monotonic() + ABORT_SECONDS)

    async def _wait_until_idle(self, not_before: float, deadline: float) -> bool:
        """Return whether nothing was in flight for a moment, after `not_before` and before the deadline."""
        while True:
            now = time.monotonic()
            calm = len(self._in_flight) == 0 and now - self._in_flight.last_change >= QUIET_SECONDS
            if calm and now >= not_before:
                return True
            if now >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
