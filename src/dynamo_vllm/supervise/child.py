"""One running process: its group, its log, and the status lines it writes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil

from dynamo_vllm.supervise import logs, ports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dynamo_vllm.supervise.plan import Process

PR_SET_PDEATHSIG = 1
GONE_SECONDS = 5.0
_POLL_SECONDS = 0.02
Status = dict[str, Any]


class Child:
    """A started process in a session of its own, so that its own children can be ended with it."""

    def __init__(
        self, plan: Process, running: asyncio.subprocess.Process, port: int, log: Path, log_start: int
    ):
        self.plan = plan
        self.port = port
        self._log = log
        self._log_start = log_start  # behind the lines of the processes before this one
        self.ready = asyncio.Event()
        self.models: tuple[str, ...] = ()
        self.instance: int | None = None
        self._ready_at: float | None = None
        self._running = running

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
        """How long it has been ready."""
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    def written(self) -> str:
        """What it wrote into its log."""
        return logs.read_from(self._log, self._log_start)

    def note(self, status: Status) -> None:
        """Remember what a status line said."""
        if status.get("phase") == "ready" and not self.ready.is_set():
            self.models = tuple(map(str, status.get("models", ())))
            self.instance = status.get("instance")
            self._ready_at = time.monotonic()
            self.ready.set()

    async def wait(self) -> int:
        return await self._running.wait()

    def terminate(self) -> None:
        """Ask the process to leave; it ends its own children."""
        with contextlib.suppress(ProcessLookupError):
            self._running.terminate()

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def destroy(self) -> list[int]:
        """End whatever is left of the group; the pids that would not go, normally none."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := members(self.pid):
            if time.monotonic() > deadline:  # the kernel holds it, in a driver for example
                return left
            self.kill_group()
            await asyncio.sleep(_POLL_SECONDS)
        await self.wait()
        return []


async def start(plan: Process, log: Path, on_status: Callable[[Child, Status], None]) -> Child:
    """Start the process; `on_status` is called with each of its status lines."""
    port = plan.port or ports.free()
    card_port = plan.card_port or ports.free() if plan.is_worker else None
    read_end, write_end = os.pipe()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have cleared it away
        with log.open("ab") as output:
            log_start = output.tell()
            running = await asyncio.create_subprocess_exec(
                *plan.command(port, write_end, card_port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(plan.env),
                pass_fds=(write_end,),
                start_new_session=True,
                preexec_fn=_leave_with(os.getpid()),
            )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    child = Child(plan, running, port, log, log_start)
    _Lines(read_end, lambda status: on_status(child, status))
    return child


def watch_without_threads() -> None:
    """Make asyncio wait for processes through the kernel; call it before the loop runs.

    Python 3.11 would start a thread per process, and when its parent is killed a process gets the signal
    of `_leave_with` once for each thread the parent had: the second one would cut a worker's drain short.
    """
    if sys.version_info < (3, 12):
        with contextlib.suppress(OSError):  # Linux before 5.3
            os.close(os.pidfd_open(os.getpid()))
            asyncio.set_child_watcher(asyncio.PidfdChildWatcher())


def members(group: int) -> list[int]:
    """Pids of a process group; a zombie only waits to be read by its parent and does not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _leave_with(parent: int) -> Callable[[], None]:
    """Runs in the new process: the kernel sends it SIGTERM when its parent is gone, however it went."""
    libc = ctypes.CDLL(None)

    def set_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went before the line above
            os._exit(1)

    return set_signal


class _Lines:
    """Reads JSON lines from a pipe on the running loop until its other end is closed."""

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
