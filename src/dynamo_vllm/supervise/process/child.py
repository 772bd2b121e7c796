"""Runs one process: its process group, its log, and the status lines it writes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from dynamo_vllm import forking, ports
from dynamo_vllm.supervise.process import logs
from dynamo_vllm.supervise.process.held import Held

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_vllm.supervise.planning.process import Process

GONE_SECONDS = 5.0
_POLL_SECONDS = 0.02
Status = dict[str, Any]


class RunningProcess(Protocol):
    """A child process, however it was started; the part of asyncio's that we use."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def release(self) -> None:
        """Signal it no more: its pid may be reused."""


class Child:
    """A started process in its own session, so that its children can be killed with it."""

    def __init__(
        self,
        plan: Process,
        running: RunningProcess,
        port: int,
        log: Path,
        log_start: int,
        reserved: contextlib.ExitStack,
    ) -> None:
        self.plan = plan
        self.port = port
        self._reserved = reserved
        self._log = log
        self._log_start = log_start  # after the lines of earlier processes
        self.ready = asyncio.Event()
        self.models: tuple[str, ...] = ()
        self.endpoint_types: tuple[str, ...] = ()
        self.instance: int | None = None
        self._ready_at: float | None = None
        self._running = running
        self._is_released = False
        self.is_leaving = False
        """Whether it was asked to stop; asked twice, it does not finish its requests."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._running.pid

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._running.returncode

    @property
    def ready_seconds(self) -> float:
        """Return how long it has been ready."""
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    def written(self) -> str:
        """Return what it wrote to its log."""
        return logs.read_from(self._log, self._log_start)

    def log_was_rotated(self, log: Path) -> None:
        """The log so far was rotated."""
        if log == self._log:
            self._log_start = 0

    def note(self, status: Status) -> None:
        """Record a status line."""
        if status.get("phase") == "ready" and not self.ready.is_set():
            self.models = tuple(map(str, status.get("models", ())))
            self.endpoint_types = tuple(map(str, status.get("endpoint_types", ())))
            self.instance = status.get("instance")
            self._ready_at = time.monotonic()
            self.ready.set()

    async def wait(self) -> int:
        return await self._running.wait()

    async def ended_within(self, seconds: float) -> bool:
        """Wait for its end, this long at most; return whether it came."""
        try:
            async with asyncio.timeout(seconds):
                await self.wait()
        except TimeoutError:
            return False
        return True

    def terminate(self) -> None:
        """Ask the process to stop; it ends its own children."""
        self.is_leaving = True
        with contextlib.suppress(ProcessLookupError):
            self._running.terminate()

    def kill_group(self) -> None:
        """Do nothing once it was released: the pid may belong to another group."""
        if not self._is_released:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def destroy(self) -> list[int]:
        """Kill what is left of the group; return the pids that did not end, normally none."""
        if self._is_released:
            return []
        deadline = time.monotonic() + GONE_SECONDS
        while (left := members(self.pid)) and time.monotonic() < deadline:
            self.kill_group()
            await asyncio.sleep(_POLL_SECONDS)
        if not left:  # otherwise the kernel keeps it, for example in a driver
            await self.wait()
        self._release()
        return left

    def abandon(self) -> None:
        """Kill it without checking the result."""
        self.kill_group()
        self._release()

    def _release(self) -> None:
        self._is_released = True
        self._running.release()
        self._reserved.close()


Start = Callable[["Process", list[str], int, int], Awaitable[RunningProcess]]
"""Starts a process with a command, a log and a status pipe (file descriptors)."""


async def start(
    plan: Process, log: Path, on_status: Callable[[Child, Status], None], start_process: Start
) -> Child:
    """Start the process; `on_status` is called with each of its status lines."""
    with contextlib.ExitStack() as reserved:

        def reserve() -> int:
            return ports.number(reserved.enter_context(ports.reserve()))

        port = plan.port or reserve()
        card_port = plan.card_port or reserve() if plan.is_worker else None
        read_end, write_end = os.pipe()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with log.open("ab") as output:
                log_start = output.tell()
                command = plan.command(port, card_port)
                running = await start_process(plan, command, output.fileno(), write_end)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        child = Child(plan, running, port, log, log_start, reserved.pop_all())
    _Lines(read_end, lambda status: on_status(child, status))
    return child


async def start_from_scratch(plan: Process, command: list[str], log: int, status: int) -> RunningProcess:
    process = _popen(plan, command, log, status)
    return Held(process.pid, process)


def _popen(plan: Process, command: list[str], log: int, status: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, "--status-fd", str(status)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(plan.env),
        pass_fds=(status,),
        start_new_session=True,
        preexec_fn=end_with_supervisor(os.getpid()),
    )


def watch_without_threads() -> None:
    """Make asyncio wait for processes through the kernel; call it before the loop runs.

    Python 3.11 would start a thread per process. When its parent is killed, a process gets the signal of
    `end_with_supervisor` once per thread of the parent: the second one would interrupt a worker's drain.
    """
    if sys.version_info < (3, 12):
        with contextlib.suppress(OSError):  # Linux before 5.3
            os.close(os.pidfd_open(os.getpid()))
            asyncio.set_child_watcher(asyncio.PidfdChildWatcher())


def members(group: int) -> list[int]:
    """Return the pids of a process group without zombies, which only wait for their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def end_with_supervisor(parent: int) -> Callable[[], None]:
    """Runs in the new process: the kernel sends it SIGTERM when its parent is gone, for any reason."""
    return functools.partial(forking.end_with_parent, parent, signal.SIGTERM)


class _Lines:
    """Read JSON lines from a pipe on the running loop until its other end is closed."""

    def __init__(self, fd: int, on_line: Callable[[Status], None]) -> None:
        self._fd = fd
        self._on_line = on_line
        self._rest = b""
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # another library wrote to this descriptor
                status = json.loads(line)
                if isinstance(status, dict):
                    self._on_line(status)
