"""Starts the processes of a plan, keeps them running, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError
from dynamo_vllm.serving.lifecycle.shutdown import end_signals, is_repeated_hangup
from dynamo_vllm.supervise import hints
from dynamo_vllm.supervise.control import server
from dynamo_vllm.supervise.keeper import Surroundings
from dynamo_vllm.supervise.kept_processes import KeptProcesses
from dynamo_vllm.supervise.operations import Operations
from dynamo_vllm.supervise.probe import Probe
from dynamo_vllm.supervise.process.log_files import LogFiles
from dynamo_vllm.supervise.process.zygote import WorkerZygote
from dynamo_vllm.supervise.prometheus_targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dynamo_vllm.supervise.keeper import Keeper
    from dynamo_vllm.supervise.limits import SupervisorLimits
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

    def __init__(
        self,
        plan: Plan,
        limits: SupervisorLimits,
        folder: RunFolder,
        screen: Screen,
        control: Path | None = None,
    ) -> None:
        """`control` is where the socket for other commands will be; None for none."""
        self._plan = plan
        self._limits = limits
        self._log_folder = folder.logs
        self._log_files = LogFiles(folder.logs, limits.log_bytes, limits.log_parts)
        self._screen = screen
        self._probe = Probe(limits.answer_seconds)
        self._changed = asyncio.Event()
        self._is_serving = False
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._killed_by: int | None = None
        self._control = control
        forking = [process for process in plan.workers if process.forks]
        self._zygote = (
            WorkerZygote(forking[0].env, plan.models, folder.logs / "zygote.log", screen.say)
            if forking
            else None
        )
        around = Surroundings(
            limits,
            folder.logs,
            Targets(folder.targets),
            screen,
            self._probe,
            self._zygote,
            changed=self._changed.set,
            end=self._end,
            answers_without=self._answers_without,
        )
        self._kept = KeptProcesses(plan, around)

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
            self._kept.start(tasks)
            more = (self._announce(), self._redraw(), self._rotate_logs(), self._listen())
            running = [tasks.create_task(work) for work in more]
            ending = await self._ending
            self._screen.say(ending.text)
            self._screen.settle()
            self._kept.cancel()
            for task in running:
                task.cancel()

    async def _listen(self) -> None:
        """Do what other commands ask for; without a socket for them serve continues."""
        if self._control is None:
            return
        operations = Operations(self._plan, self._kept, lambda: self._is_serving, self._screen.say)
        try:
            await server.listen(self._control, operations.perform)
        except OSError as exc:
            self._screen.say(
                f"the control socket {self._control} cannot be opened: {exc.strerror or exc}; 'processes', "
                "'restart', 'drain' and 'scale' do not work with this serve (set TMPDIR to a folder with a "
                "short name)"
            )

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
        for child in self._kept.children:
            child.kill_group()

    def _answers_without(self, process: Process) -> bool:
        """Return whether anything is served while this process pauses."""
        return process.is_worker and any(
            not other.is_drained and (not other.is_given_up or other.is_ready)
            for other in self._kept.workers
            if other.process is not process and not (other.process.card and other.process.card.helps_others)
        )

    # --- all of them ------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Say that it serves once a real request was answered; then where the other processes are."""
        await self._until(self._all_ready)
        models = self._models()
        prefill = (child for child in self._kept.children if child.plan.card and child.plan.card.gives_kv)
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
        extra = [keeper for keeper in self._kept if not keeper.process.is_essential]
        late = [keeper for keeper in extra if not self._show_url(keeper)]
        self._screen.hint(hints.for_all(self._plan.url, models, self._plan.needs_key, self._plan.has_gateway))
        for keeper in late:
            await self._until(functools.partial(self._show_url, keeper))

    def _show_url(self, keeper: Keeper) -> bool:
        """Say where a process is that is not essential; return whether that is done."""
        if keeper.process.url is not None and keeper.is_ready:
            self._screen.announce(f"{keeper.name}: {keeper.process.url}")
        return keeper.process.url is None or keeper.is_ready

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that depends on the phases of processes."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _models(self) -> dict[str, tuple[str, ...]]:
        """Return the name of each model, and the types of endpoints on which it answers."""
        models: dict[str, tuple[str, ...]] = {}
        for child in self._kept.children:
            for name in child.models[:1]:
                models[name] = models.get(name) or child.endpoint_types  # a helper of others has none
        return models

    def _all_ready(self) -> bool:
        return all(keeper.is_ready for keeper in self._kept if keeper.process.is_essential)

    async def _redraw(self) -> None:
        while not self._is_serving:
            await asyncio.sleep(_REDRAW_SECONDS)
            self._screen.redraw()

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(self._limits.look_seconds)
            for log in await self._log_files.look():
                for child in self._kept.children:
                    child.log_was_rotated(log)

    def _drain_seconds(self) -> float:
        """The time for running requests; before the first answer there are none."""
        times = (keeper.process.drain_seconds for keeper in self._kept.workers)
        return max(times, default=0.0) if self._is_serving else 0.0

    async def _stop(self) -> None:
        """Stop workers first, so that the frontend can deliver their last output; then the rest."""
        workers = [child for child in self._kept.children if child.plan.is_worker]
        others = [child for child in self._kept.children if not child.plan.is_worker]
        await self._terminate_all(workers, self._drain_seconds() + self._limits.stop_seconds)
        await self._terminate_all(others, self._limits.stop_seconds)
        for keeper in self._kept:
            if keeper.child is not None:
                await keeper.destroy(keeper.child)
        self._screen.say("stopped")

    async def _terminate_all(self, leaving: Sequence[Child], limit_seconds: float) -> None:
        waiting = [asyncio.create_task(child.wait()) for child in leaving]
        for child in leaving:
            if not child.is_leaving:  # a second signal would cut its requests short
                child.terminate()
        if not waiting:
            return
        _, late = await asyncio.wait(waiting, timeout=limit_seconds)
        for task in late:
            task.cancel()
        for child in leaving:
            if child.exit_code is None:
                self._screen.say(f"{child.name} did not stop within {limit_seconds:.0f} s: killed")
