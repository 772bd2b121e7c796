"""Starts the processes of a plan, keeps them running, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError
from dynamo_vllm.serving.lifecycle.shutdown import end_signals, is_repeated_hangup
from dynamo_vllm.supervise import discovery, hints
from dynamo_vllm.supervise.limits import Pulse, Restarts, SupervisorLimits
from dynamo_vllm.supervise.probe import Probe
from dynamo_vllm.supervise.process import child as children
from dynamo_vllm.supervise.process.ended import EndedProcess, describe
from dynamo_vllm.supervise.process.log_files import LogFiles
from dynamo_vllm.supervise.process.zygote import WorkerZygote
from dynamo_vllm.supervise.prometheus_targets import Targets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dynamo_vllm.supervise.planning.process import Plan, Process
    from dynamo_vllm.supervise.process.child import Child
    from dynamo_vllm.supervise.run_folder import RunFolder
    from dynamo_vllm.supervise.screen import Screen

_REDRAW_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ending:
    """Why everything stops, and serve's exit code for it."""

    code: int
    text: str


class Supervisor:
    """One `run`, from the first start until the last process is gone."""

    def __init__(self, plan: Plan, limits: SupervisorLimits, folder: RunFolder, screen: Screen) -> None:
        self._plan = plan
        self._limits = limits
        self._log_folder = folder.logs
        self._log_files = LogFiles(folder.logs, limits.log_bytes, limits.log_parts)
        self._targets = Targets(folder.targets)
        self._screen = screen
        self._probe = Probe(limits.answer_seconds)
        self._children: dict[str, Child] = {}
        self._changed = asyncio.Event()
        self._is_serving = False
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._killed_by: int | None = None
        self._given_up: set[str] = set()
        forking = [process for process in plan.workers if process.forks]
        self._zygote = (
            WorkerZygote(forking[0].env, plan.models, folder.logs / "zygote.log", screen.say)
            if forking
            else None
        )

    async def run(self) -> int:
        """Serve until a signal or a fatal failure; return the exit code."""
        with self._signals():
            try:
                await self._serve()
            finally:
                if self._zygote is not None:
                    self._zygote.close()
                await self._stop()
                await self._probe.close()
        return self._ending.result().code if self._killed_by is None else 128 + self._killed_by

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._keep(process)) for process in self._plan.processes]
            running += map(tasks.create_task, (self._announce(), self._redraw(), self._rotate_logs()))
            ending = await self._ending
            self._screen.say(ending.text)
            self._screen.settle()
            for task in running:
                task.cancel()

    def _end(self, code: int, text: str) -> None:
        if not self._ending.done():
            self._ending.set_result(Ending(code, text))

    # --- signals ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = end_signals()
        for number in numbers:
            loop.add_signal_handler(number, self._signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _signal(self, number: int) -> None:
        """The first signal asks everything to stop, the second kills."""
        if is_repeated_hangup(number, self._ending.done()):
            return
        if not self._ending.done():
            seconds = self._drain_seconds()
            self._end(
                0, f"stopping: running requests get {seconds:.0f} s; a second signal ends everything at once"
            )
            return
        self._killed_by = number
        self._screen.say("ending at once")
        for child in self._children.values():
            child.kill_group()

    # --- one process ------------------------------------------------------------------------------------

    async def _keep(self, process: Process) -> None:
        """Start the process, and start it again whenever it ends."""
        restarts = Restarts(self._limits)
        while True:
            try:
                ended = await self._run_once(process)
            except Exception as exc:  # whatever it is, the other processes continue
                ended = self._abandon(process, exc)
            if not ended.was_ready and restarts.in_a_row == 0:
                self._end(
                    ended.code if ended.code in (1, 2, 3) else 1, self._describe_failure(process, ended)
                )
                return
            pause = restarts.pause_after(ended.ready_seconds)
            if pause is not None:
                self._screen.say(f"{process.name} {ended.reason}; starting it again in {pause:.0f} s")
            elif self._answers_without(process):
                pause = self._give_up(process, ended)
            else:
                limit = self._limits.restarts
                self._end(
                    1,
                    f"{self._describe_failure(process, ended)}\n  giving up after {limit} restarts in a row",
                )
                return
            await asyncio.sleep(pause)

    def _give_up(self, process: Process, ended: EndedProcess) -> float:
        """Pause before the next try of a process that keeps failing, without affecting the others."""
        self._given_up.add(process.name)
        pause = self._limits.retry_seconds
        self._screen.say(
            f"{self._describe_failure(process, ended)}\n  giving up on {process.name} after "
            f"{self._limits.restarts} "
            f"restarts in a row; the others keep serving, and it is started again in {pause:.0f} s"
        )
        return pause

    def _answers_without(self, process: Process) -> bool:
        """Return whether anything is served while this process pauses."""
        return process.is_worker and any(
            other.name not in self._given_up or self._is_ready(other)
            for other in self._plan.workers
            if other is not process and not (other.card and other.card.helps_others)
        )

    async def _run_once(self, process: Process) -> EndedProcess:
        self._screen.phase(process.name, "starting")
        try:
            child = await children.start(
                process, self._log(process), self._status, self._start_method(process)
            )
        except (OSError, StartError) as exc:
            return EndedProcess(f"could not be started: {exc}", False, 0.0, None, "")
        self._children[process.name] = child
        self._targets.started(process, child.port)
        reason = await self._wait_for_end(child)
        if child.instance is not None:
            await discovery.forget(child.instance, process.env)
        ready_seconds = child.ready_seconds
        await self._destroy(child)
        del self._children[process.name]
        return EndedProcess(reason, child.ready.is_set(), ready_seconds, child.exit_code, child.written())

    def _start_method(self, process: Process) -> children.Start:
        if self._zygote is None or not process.forks or not self._zygote.fits(process.env):
            return children.start_from_scratch
        self._screen.phase(process.name, "importing")
        return self._zygote.start

    def _abandon(self, process: Process, exc: Exception) -> EndedProcess:
        """Kill a process after an error of ours: nothing watches it any more."""
        self._screen.say("".join(traceback.format_exception(exc)).rstrip())
        reason = f"could not be watched ({exc!r})"
        child = self._children.pop(process.name, None)
        if child is None:
            return EndedProcess(reason, False, 0.0, None, "")
        child.abandon()
        return EndedProcess(reason, child.ready.is_set(), child.ready_seconds, child.exit_code, "")

    def _log(self, process: Process) -> Path:
        return self._log_folder / f"{process.name}.log"

    def _describe_failure(self, process: Process, ended: EndedProcess) -> str:
        return ended.describe_failure(process.name, self._log(process))

    def _status(self, child: Child, status: children.Status) -> None:
        child.note(status)
        self._screen.phase(child.name, str(status.get("phase")))
        self._changed.set()

    async def _wait_for_end(self, child: Child) -> str:
        """Wait until the process has ended or must be ended; return why."""
        exited = asyncio.create_task(child.wait())
        hung = asyncio.create_task(self._watch_health(child))
        try:
            await asyncio.wait({exited, hung}, return_when=asyncio.FIRST_COMPLETED)
            return describe(exited.result()) if exited.done() else hung.result()
        finally:
            exited.cancel()
            hung.cancel()

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
            verdict = pulse.verdict(await self._probe.status(url), time.monotonic())
            if verdict is not None:
                return verdict

    # --- all of them ------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Say that it serves once a real request was answered."""
        while not self._all_ready():
            self._changed.clear()
            await self._changed.wait()
        found = self._children.values()
        models = self._models()
        prefill = (child for child in found if child.plan.card and child.plan.card.gives_kv)
        split = {name for child in prefill for name in child.models[:1]}
        try:
            await self._probe.first_answer(
                self._plan.frontend_url or self._plan.url, models, split, self._limits.first_answer_seconds
            )
        except StartError as exc:
            self._end(1, f"error: {exc}\n  logs: {self._log_folder}")
            return
        self._is_serving = True
        workers = len(self._plan.workers)
        self._screen.announce(f"ready: {self._plan.url}/v1 model={hints.named(models)} workers={workers}")
        self._screen.hint(hints.for_all(self._plan.url, models, self._plan.needs_key, self._plan.has_gateway))

    def _models(self) -> dict[str, tuple[str, ...]]:
        """Return the name of each model, and the types of endpoints on which it answers."""
        models: dict[str, tuple[str, ...]] = {}
        for child in self._children.values():
            for name in child.models[:1]:
                models[name] = models.get(name) or child.endpoint_types  # a helper of others has none
        return models

    def _all_ready(self) -> bool:
        return all(map(self._is_ready, self._plan.processes))

    def _is_ready(self, process: Process) -> bool:
        child = self._children.get(process.name)
        return child is not None and child.ready.is_set()

    async def _redraw(self) -> None:
        while not self._is_serving:
            await asyncio.sleep(_REDRAW_SECONDS)
            self._screen.redraw()

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(self._limits.look_seconds)
            for log in await self._log_files.look():
                for child in self._children.values():
                    child.log_was_rotated(log)

    def _drain_seconds(self) -> float:
        """The time for running requests; before the first answer there are none."""
        return max(process.drain_seconds for process in self._plan.workers) if self._is_serving else 0.0

    async def _stop(self) -> None:
        """Stop workers first, so that the frontend can deliver their last output; then the rest."""
        workers = [child for child in self._children.values() if child.plan.is_worker]
        others = [child for child in self._children.values() if not child.plan.is_worker]
        await self._terminate_all(workers, self._drain_seconds() + self._limits.stop_seconds)
        await self._terminate_all(others, self._limits.stop_seconds)
        for child in self._children.values():
            await self._destroy(child)
        self._screen.say("stopped")

    async def _destroy(self, child: Child) -> None:
        """Kill what a process leaves behind too: vLLM's engine core outlives a killed worker."""
        if left := await child.destroy():
            self._screen.say(f"error: processes {left} of {child.name} do not end")

    async def _terminate_all(self, leaving: Sequence[Child], limit_seconds: float) -> None:
        waiting = [asyncio.create_task(child.wait()) for child in leaving]
        for child in leaving:
            child.terminate()
        if not waiting:
            return
        _, late = await asyncio.wait(waiting, timeout=limit_seconds)
        for task in late:
            task.cancel()
        for child in leaving:
            if child.exit_code is None:
                self._screen.say(f"{child.name} did not stop within {limit_seconds:.0f} s: killed")
