"""Forks processes from a zygote: a process with one thread that has imported what they need.

A forked process becomes a child of the zygote's owner, which waits for it and signals it as if it had started
it by itself, and keeps it when the zygote ends. For that the zygote forks twice: the process in the middle
ends at once, and the kernel gives its child to the nearest ancestor that asked for orphans, the owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!i")
MAX_FDS = 16
_SAFE_THREADS = ("cuda0", "jemalloc_bg")
"""Threads of NVML, which vLLM uses to list GPUs, and of pyarrow's allocator: both libraries handle forks."""


class CannotFork(Exception):
    """The zygote has ended, or cannot fork; the message says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a forked process does."""

    call: str
    """module:function; it gets the file descriptors that came with the task, then `args`."""
    args: tuple[Any, ...]
    env: Mapping[str, str]
    """Its whole environment."""
    end_signal: int = signal.SIGTERM
    """What the kernel sends it when its owner ends."""
    own_session: bool = False


class Zygote:
    """The owner's side of a zygote."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid

    def send(self, task: Task, fds: Sequence[int] = ()) -> None:
        """Request a process; the answer is a line for `parse_pid`."""
        payload = pickle.dumps(task)
        try:
            socket.send_fds(self.connection, [_LENGTH.pack(len(payload))], list(fds))
            self.connection.sendall(payload)
        except OSError as exc:
            raise CannotFork(f"the zygote has ended ({exc.strerror})") from exc

    def fork(self, task: Task, fds: Sequence[int] = ()) -> int:
        """Fork a process that runs the task, and return its pid."""
        with adopting():
            self.send(task, fds)
            line = b""
            while not line.endswith(b"\n"):
                try:
                    more = self.connection.recv(4096)
                except OSError as exc:
                    raise CannotFork(f"the zygote has ended ({exc.strerror})") from exc
                if not more:
                    raise CannotFork("the zygote has ended")
                line += more
        return parse_pid(line)

    def close(self) -> None:
        """End the zygote; forked processes continue."""
        self.connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def parse_pid(line: bytes) -> int:
    """Return the pid from a zygote's answer."""
    answer = json.loads(line)
    if "pid" not in answer:
        raise CannotFork(str(answer.get("error", answer)))
    return int(answer["pid"])


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make this process adopt orphans while its zygote forks. At other times they go to init."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def end_with_parent(parent: int, number: int) -> None:
    """Ask the kernel for a signal when our parent, which must be `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def other_threads() -> list[str]:
    """Return names of threads that prevent a fork: their locks would stay locked in the new process."""
    names = [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in native_threads()]
    return [name for name in names[1:] if not name.startswith(_SAFE_THREADS)]


def native_threads() -> list[str]:
    """Return the thread ids of this process, in order of creation."""
    return sorted(os.listdir("/proc/self/task"), key=int)


def make_zygote() -> Zygote:
    """Fork a zygote from this process."""
    if found := other_threads():
        raise CannotFork(f"other threads are running: {', '.join(found)}")
    owner = os.getpid()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        end_with_parent(owner, signal.SIGKILL)
        serve(theirs, owner)
    theirs.close()
    return Zygote(ours, pid)


def serve(connection: socket.socket, owner: int) -> NoReturn:
    """Run the zygote: fork on request, until the owner ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # from a terminal: the owner decides when the zygote ends
    gc.collect()
    gc.freeze()  # forked processes share these objects, and their collectors need not scan them
    with contextlib.suppress(OSError):
        while request := _receive(connection):
            payload, fds = request
            connection.sendall(json.dumps(_fork(connection, payload, fds, owner)).encode() + b"\n")
            for fd in fds:
                os.close(fd)
    os._exit(0)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_FDS)
    while head and len(head) < _LENGTH.size:
        head += connection.recv(_LENGTH.size - len(head))
    if not head:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = bytearray()
    while len(payload) < length:
        if not (more := connection.recv(min(length - len(payload), 1 << 20))):
            return None
        payload += more
    return bytes(payload), fds


def _fork(connection: socket.socket, payload: bytes, fds: list[int], owner: int) -> dict[str, object]:
    report_read, report_write = os.pipe()
    start_read, start_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            os.close(start_write)
            os.read(start_read, 1)  # until the process in the middle has ended and was waited for
            os.close(report_read)
            os.close(start_read)
            connection.close()
            _run(payload, fds, owner, report_write)
        os.write(report_write, _NUMBER.pack(pid))
        os._exit(0)
    os.waitpid(middle, 0)
    for fd in (report_write, start_read, start_write):
        os.close(fd)
    with open(report_read, "rb") as reports:
        (pid,) = _NUMBER.unpack(reports.read(_NUMBER.size))
        if reports.read(1):
            return {"pid": pid}
    return {"error": "the forked process ended at once; this system may not support child subreapers"}


def _run(payload: bytes, fds: list[int], owner: int, report: int) -> NoReturn:
    """Run the task in the forked process; it handles signals before its owner knows its pid."""
    code = 1
    try:
        task: Task = pickle.loads(payload)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(owner, task.end_signal)
        if task.own_session:
            os.setsid()
        os.write(report, b".")
        os.close(report)
        os.environ.clear()
        os.environ.update(task.env)
        module, _, name = task.call.partition(":")
        code = int(getattr(importlib.import_module(module), name)(fds, *task.args) or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
