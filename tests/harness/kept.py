"""A supervisor over small real processes, in the process of a test, and orders to it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.supervise.control import client
from dynamo_vllm.supervise.limits import SupervisorLimits
from dynamo_vllm.supervise.planning.process import Group, Plan, Process
from dynamo_vllm.supervise.run_folder import RunFolder
from dynamo_vllm.supervise.screen import Screen
from dynamo_vllm.supervise.supervisor import Supervisor
from harness.waiting import until

LIMITS = SupervisorLimits(max_pause_seconds=0.01, stop_seconds=5.0)
# Without pathlib and signal, whose imports take as long as all else of a start.
_HEAD = """
import os, sys, time
import _signal as signal
def say(phase):
    os.write(int(sys.argv[-1]), b'{"phase": "%s", "models": ["m"], "instance": 10}\\n' % phase.encode())
def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.01)
"""
# Ready at once, and nothing else.
SCRIPT = (
    _HEAD
    + """
say("ready")
signal.pause()
"""
)
# Ready when a file `go` is there, which says how it starts.
SLOW = (
    _HEAD
    + """
say("loading")
wait_for("go")
say("ready")
signal.pause()
"""
)
# Fails while a file `broken` is there.
FRAIL = (
    _HEAD
    + """
if os.path.exists("broken"):
    sys.exit("error: it is broken")
say("ready")
signal.pause()
"""
)
# Ends when it was asked to and a file `finished` is there; a second signal ends it at once.
DRAINS = (
    _HEAD
    + """
asked = []
def stop(*_):
    asked.append(1)
    if len(asked) > 1:
        open("cut-short", "w").close()
        os._exit(143)
signal.signal(signal.SIGTERM, stop)
say("ready")
while not asked:
    time.sleep(0.01)
say("stopping")
wait_for("finished")
"""
)
FAILS = "import sys; sys.exit('error: no such thing')"


def worker(name: str, script: str = SCRIPT, **more: Any) -> Process:
    about = {"drain_seconds": 0.0, "role": "agg", "group": "worker", **more}
    return Process(
        name=name,
        argv=(sys.executable, "-IS", "-c", script, name),
        env={"DYN_DISCOVERY_BACKEND": "file"},
        health="http://127.0.0.1:{port}/live",
        port=None,
        **about,
    )


class MoreWorkers:
    """Groups `worker` and `other` of one model, on a machine with room for four workers."""

    def __init__(self, script: str = SCRIPT, drain_seconds: float = 0.0) -> None:
        self.groups = {name: Group(name, "m", "agg") for name in ("worker", "other")}
        self.released: list[str] = []
        self._script = script
        self._drain_seconds = drain_seconds

    def more(self, group: str, running: Sequence[Process], count: int) -> list[Process]:
        if len(running) + count > 4:
            raise ConfigError("there are not enough GPUs")
        taken = {process.name for process in running}
        names = [name for name in (f"worker-{number}" for number in range(1, 9)) if name not in taken]
        about = {"group": group, "drain_seconds": self._drain_seconds}
        return [worker(name, self._script, **about) for name in names[:count]]

    def release(self, worker: Process) -> None:
        self.released.append(worker.name)


class Kept:
    """Processes that are kept."""

    def __init__(
        self, folder: RunFolder, out: io.StringIO, err: io.StringIO, life: asyncio.Task[int], control: Path
    ) -> None:
        self.logs = folder.logs
        self.targets = folder.targets
        self.control = control
        self._out = out
        self._err = err
        self.life = life

    @property
    def out(self) -> str:
        return self._out.getvalue()

    @property
    def said(self) -> str:
        return self._err.getvalue()

    # --- its processes ----------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        return self._process(name).pid

    def ports(self, name: str) -> list[str]:
        words = self._process(name).cmdline()
        return [words[words.index(flag) + 1] for flag in ("--system-port", "--card-port")]

    def _process(self, name: str) -> psutil.Process:
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # one that has just ended
                found += [child] if name in child.cmdline() else []
        (process,) = found
        return process

    # --- orders -----------------------------------------------------------------------------------------

    async def ask(
        self, verb: str, on_progress: Callable[[dict[str, Any]], None] = lambda _: None, **more: object
    ) -> dict[str, Any]:
        return await client.ask(self.control, {"verb": verb, **more}, on_progress)

    async def processes(self) -> dict[str, dict[str, Any]]:
        return {found["name"]: found for found in (await self.ask("processes"))["processes"]}

    # --- waiting ----------------------------------------------------------------------------------------

    async def ended(self) -> None:
        await asyncio.wait([self.life])

    async def ready(self, name: str, times: int = 1) -> None:
        await self.tells(f"{name}: ready", times)
        assert not self.life.done(), f"{self.life}\n{self.said}"

    async def tells(self, text: str, times: int = 1) -> None:
        """Wait until it has said this so often."""
        await asyncio.to_thread(
            until, f"{text!r} {times} times", lambda: self.life.done() or self.said.count(text) >= times
        )
        assert self.said.count(text) >= times, self.said

    async def prints(self, text: str) -> None:
        await asyncio.to_thread(until, f"{text!r}", lambda: self.life.done() or text in self.out)
        assert text in self.out, self.said


@contextlib.asynccontextmanager
async def kept(
    path: Path,
    limits: SupervisorLimits = LIMITS,
    code: int = 0,
    *,
    first: Process | None = None,
    beside: Sequence[Process] = (),
    pool: MoreWorkers | None = None,
    control: Path | None = None,
) -> AsyncIterator[Kept]:
    """Keep two workers, of which the `first` may be another one, and what is beside them."""
    folder, out, err = RunFolder(path / "run"), io.StringIO(), io.StringIO()
    workers = (first or worker("worker-1"), worker("worker-2"), *beside)
    control = control or path / "control"
    async with healthy() as port:
        plan = Plan(
            f"http://127.0.0.1:{port}",
            "127.0.0.1",
            port,
            ("m",),
            workers,
            FrontendOptions(),
            pool=pool or MoreWorkers(),
        )
        with folder.opened():
            life = asyncio.create_task(Supervisor(plan, limits, folder, Screen(out, err), control).run())
            made = Kept(folder, out, err, life, control)
            try:
                await made.ready("worker-1")
                await made.ready("worker-2")
                yield made
            finally:
                if not life.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait([life])
            assert life.result() == code, made.said


@contextlib.asynccontextmanager
async def healthy() -> AsyncIterator[int]:
    """Yield the port of a server that answers 200 to everything, as a ready frontend does to /health."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
