"""Keeps one process running: starts it, watches it, and starts it again when it ends or somebody asks."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dynamo_vllm.errors import StartError
from dynamo_vllm.supervise import discovery
from dynamo_vllm.supervise.limits import Pulse, Restarts
from dynamo_vllm.supervise.process import child as children
from dynamo_vllm.supervise.process.ended import ON_ORDER, EndedProcess, describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dynamo_vllm.supervise.limits import SupervisorLimits
    from dynamo_vllm.supervise.planning.process import Process
    from dynamo_vllm.supervise.probe import Probe
    from dynamo_vllm.supervise.process.child import Child
    from dynamo_vllm.supervise.process.zygote import WorkerZygote
    from dynamo_vllm.supervise.prometheus_targets import Targets
    from dynamo_vllm.supervise.screen import Screen

STARTING, READY, DRAINING, WAITING, STOPPED = "starting", "ready", "draining", "waiting", "stopped"
"""States of a kept process; `waiting` is the pause before it is started again."""
DRAINED = "drained"
"""Phase of a process that is stopped until somebody starts it again."""
LEAVE_SECONDS = 1.0
"""The least between two signals, for leaving discovery; the kernel would make one of two at once."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all kept processes share."""

    limits: SupervisorLimits
    log_folder: Path
    targets: Targets
    screen: Screen
    probe: Probe
    zygote: WorkerZygote | None
    changed: Callable[[], None]
    """Called when a process changed its phase."""
    end: Callable[[int, str], None]
    """Ends everything, with an exit code and a text."""
    answers_without: Callable[[Process], bool]
    """Whether anything is served while this process pauses."""


class OrderFailed(Exception):
    """The process did not do what was asked; the text says why."""


Action = Literal["start", "restart", "drain", "stop"]
"""`start` is the first start of a process that was added; `drain` stops one, and `stop` also forgets it."""


@dataclass(slots=True)
class Order:
    """What an operator asked of one process."""

    action: Action
    drain_seconds: float | None
    """Time for running requests; None is the process's own."""
    report: Callable[[str, str], None]
    """Called with the name of the process and its new phase."""
    done: asyncio.Future[None]
    has_ended: bool = False
    """Whether the process that was there has ended, or there was none."""

    def settle(self, failure: str | None = None) -> None:
        if self.done.done():
            return
        if failure is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(OrderFailed(failure))
            self.done.exception()  # whoever asked may have gone; asyncio would complain


class Keeper:
    """One process of a running `serve`."""

    def __init__(self, process: Process, around: Surroundings, first: Order | None = None) -> None:
        """`first` is the order that added the process; if it does not become ready, it is not kept."""
        self.process = process
        self.child: Child | None = None
        self.state = STARTING
        self.phase = STARTING
        self.since = time.time()
        self.starts = 0
        self.last: EndedProcess | None = None
        self.last_at: float | None = None
        """When `last` ended."""
        self.is_given_up = False
        self._around = around
        self._limits = around.limits
        self._was_added = first is not None
        self._is_quiet = False
        """It is not essential and keeps failing, which was said."""
        self.order = first
        self._ordered = asyncio.Event()

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def log(self) -> Path:
        return self._around.log_folder / f"{self.name}.log"

    @property
    def is_ready(self) -> bool:
        return self.child is not None and self.child.ready.is_set()

    @property
    def is_drained(self) -> bool:
        """Whether it is stopped on purpose, until it is restarted or removed."""
        return self.phase == DRAINED

    def give(self, order: Order) -> None:
        """Ask for something; the caller has checked that no other order is under way."""
        assert self.order is None
        self.order = order
        self._ordered.set()

    async def keep(self) -> None:
        """Start the process, and start it again whenever it ends, until it is ordered to stop."""
        restarts = Restarts(self._limits)
        try:
            while True:
                try:
                    ended = await self._run_once()
                except Exception as exc:  # whatever it is, the other processes continue
                    ended = self._abandon(exc)
                self.last, self.last_at = ended, time.time()
                if not self._begins_order():
                    pause = self._pause_after(ended, restarts)
                    if pause is None:
                        return
                    await self._wait(pause)
                while self.order is not None and self.order.action == "drain":
                    await self._rest()
                if self.order is not None and self.order.action == "stop":
                    self._enter(STOPPED)
                    self._settle()
                    return
        finally:
            self._settle("serve is stopping")

    async def _wait(self, seconds: float) -> None:
        """Wait until the pause is over, or somebody asks for something."""
        self._enter(WAITING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ordered.wait()
        self._begins_order()

    async def _rest(self) -> None:
        """Stay stopped until somebody asks for something else."""
        self._around.targets.removed(self.process)
        self.is_given_up = False
        self._enter(STOPPED, DRAINED)
        self._settle()
        await self._ordered.wait()
        self._begins_order()

    def _begins_order(self) -> bool:
        """Return whether the process ended because it was ordered to, or while it was."""
        if self.order is None or not self._ordered.is_set():
            return False
        self._ordered.clear()
        self.order.has_ended = True
        return True

    # --- after its end ----------------------------------------------------------------------------------

    def _pause_after(self, ended: EndedProcess, restarts: Restarts) -> float | None:
        """Return the seconds until the next start; None if there is none."""
        text = ended.describe_failure(self.name, self.log)
        action = None if self.order is None else self.order.action
        if self.order is not None:  # it ended before it was ready
            self._settle(text)
        if action == "start":
            return None
        if not self.process.is_essential:
            return self._pause_of_extra(ended, restarts)
        is_first = not ended.was_ready and self.starts == 1 and not self._was_added
        if is_first and not ended.found_discovery_busy:
            self._around.end(ended.code if ended.code in (1, 2, 3) else 1, text)
            return None
        pause = restarts.pause_after(ended.ready_seconds)
        if pause is not None:
            why = ", as discovery was busy" if ended.found_discovery_busy else ""
            self._around.screen.say(f"{self.name} {ended.reason}{why}; starting it again in {pause:.0f} s")
            return pause
        limit = self._limits.restarts
        if not self._around.answers_without(self.process):
            self._around.end(1, f"{text}\n  giving up after {limit} restarts in a row")
            return None
        self.is_given_up = True
        pause = self._limits.retry_seconds
        self._around.screen.say(
            f"{text}\n  giving up on {self.name} after {limit} restarts in a row; the others keep serving, "
            f"and it is started again in {pause:.0f} s"
        )
        return pause

    def _pause_of_extra(self, ended: EndedProcess, restarts: Restarts) -> float:
        """Say once in a row of failures that serve continues without it."""
        pause = restarts.pause_after(ended.ready_seconds)
        if not self._is_quiet:
            self._is_quiet = True
            why = f": {error}" if (error := ended.error) else ""
            self._around.screen.say(
                f"{self.name} {ended.reason}{why}; everything else goes on, and it is tried again "
                f"(log: {self.log})"
            )
        return self._limits.retry_seconds if pause is None else pause

    def _settle(self, failure: str | None = None) -> None:
        """End the order."""
        if self.order is not None:
            self.order.settle(failure)
            self.order = None

    # --- one run ----------------------------------------------------------------------------------------

    async def _run_once(self) -> EndedProcess:
        self.starts += 1
        self._enter(STARTING)
        try:
            number = self.starts
            child = await children.start(
                self.process,
                self.log,
                lambda child, status: self._status(number, child, status),
                self._start_method(),
            )
        except (OSError, StartError) as exc:
            return EndedProcess(f"could not be started: {exc}", False, 0.0, None, "")
        self.child = child
        self._around.targets.started(self.process, child.port)
        reason = await self._wait_for_end(child)
        if child.instance is not None:
            await discovery.forget(child.instance, self.process.env)
        ready_seconds = child.ready_seconds
        await self.destroy(child)
        self.child = None
        return EndedProcess(reason, child.ready.is_set(), ready_seconds, child.exit_code, child.written())

    def _start_method(self) -> children.Start:
        zygote = self._around.zygote
        if zygote is None or not self.process.forks or not zygote.fits(self.process.env):
            return children.start_from_scratch
        self._enter(STARTING, "importing")
        return zygote.start

    def _abandon(self, exc: Exception) -> EndedProcess:
        """Kill a process after an error of ours: nothing watches it any more."""
        self._around.screen.say("".join(traceback.format_exception(exc)).rstrip())
        reason = f"could not be watched ({exc!r})"
        child, self.child = self.child, None
        if child is None:
            return EndedProcess(reason, False, 0.0, None, "")
        child.abandon()
        return EndedProcess(reason, child.ready.is_set(), child.ready_seconds, child.exit_code, "")

    def _status(self, start: int, child: Child, status: children.Status) -> None:
        """Take a status line of the process that was started as number `start`."""
        child.note(status)
        if start != self.starts or child.exit_code is not None:
            return
        phase = str(status.get("phase"))
        is_ready = phase == READY
        if is_ready and self._is_quiet:
            self._is_quiet = False
            self._around.screen.say(f"{self.name} is ready again")
        if self.state != DRAINING:
            self._enter(READY if child.ready.is_set() else STARTING, phase)
        if is_ready and self.order is not None and self.order.has_ended:
            self._settle()

    def _enter(self, state: str, phase: str | None = None) -> None:
        """Note and show the state; the phase is what the process itself calls it."""
        phase = phase or state
        if state != self.state:
            self.since = time.time()
        self.state, self.phase = state, phase
        if state not in (WAITING, STOPPED) and not self._is_quiet:
            self._around.screen.phase(self.name, phase)
        if self.order is not None:
            self.order.report(self.name, phase)
        self._around.changed()

    async def _wait_for_end(self, child: Child) -> str:
        """Wait until the process has ended or must be ended; return why."""
        exited = asyncio.create_task(child.wait())
        hung = asyncio.create_task(self._watch_health(child))
        ordered = asyncio.create_task(self._ordered.wait())
        try:
            await asyncio.wait({exited, hung, ordered}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return describe(exited.result())
            if hung.done():
                return hung.result()
            hung.cancel()
            return await self._leave(child)
        finally:
            for task in (exited, hung, ordered):
                task.cancel()

    async def _watch_health(self, child: Child) -> str:
        """Return when the process does not become ready, or stops answering."""
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                await child.ready.wait()
        except TimeoutError:
            return f"was not ready after {self._limits.start_seconds:.0f} s (--start-seconds)"
        pulse = Pulse(self._limits, time.monotonic())
        url = child.plan.health_url(child.port)
        while True:
            await asyncio.sleep(self._limits.look_seconds)
            asked_at = time.monotonic()
            status = await self._around.probe.status(url, pulse.patience(asked_at))
            verdict = pulse.verdict(status, asked_at, time.monotonic())
            if verdict is not None:
                return verdict

    async def _leave(self, child: Child) -> str:
        """Let the process finish its requests and end, as the order says; what is left is killed later."""
        assert self.order is not None
        own, asked = self.process.drain_seconds, self.order.drain_seconds
        self._enter(DRAINING)
        child.terminate()
        if asked is None or asked >= own:
            has_ended = await child.ended_within(own + self._limits.stop_seconds)
        elif not (has_ended := await child.ended_within(max(asked, LEAVE_SECONDS))):
            child.terminate()  # the second signal: requests that still run move to other workers
            has_ended = await child.ended_within(self._limits.stop_seconds)
        if not has_ended:
            self._around.screen.say(f"{self.name} did not stop in time: killed")
        return ON_ORDER

    async def destroy(self, child: Child) -> None:
        """Kill what a process leaves behind too: vLLM's engine core outlives a killed worker."""
        if left := await child.destroy():
            self._around.screen.say(f"error: processes {left} of {child.name} do not end")
