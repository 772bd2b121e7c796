"""Starts processes with a log each, waits for them, and ends them with everything below them.

For tests and scripts alike; it needs nothing but psutil.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from harness.waiting import NotInTime, until

T = TypeVar("T")
COMMAND = (sys.executable, "-m", "dynamo_vllm.cli.main")
STOP_SECONDS = 60.0


class StartFailed(AssertionError):
    """A process ended, or was not ready in time; the text says which, and what it wrote last."""


@dataclass
class Started:
    """A process of ours, the first of its group."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def poll(self) -> int | None:
        return self.popen.poll()

    def wait(self, timeout: float) -> int:
        return self.popen.wait(timeout)

    def send_signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def written(self) -> str:
        return self.log.read_text(errors="replace")

    def last_lines(self, count: int = 15) -> str:
        return "\n".join(f"  | {line}" for line in self.written().splitlines()[-count:])

    def below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def tree(self) -> list[psutil.Process]:
        """This process and those below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.pid), *self.below()]
        return []

    def stop(self, number: int = signal.SIGTERM, seconds: float = STOP_SECONDS) -> list[str]:
        """Asks it to end, and kills what has not ended in time; says what that was."""
        below, complaints = self.below(), []
        if self.poll() is None:
            self.send_signal(number)
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            complaints.append(f"{self.name} did not end within {seconds:.0f} s")
            self.popen.kill()
            self.wait(STOP_SECONDS)
        for process in survivors(below, min(seconds, 10)):
            with contextlib.suppress(psutil.NoSuchProcess):
                complaints.append(f"{self.name} left {' '.join(process.cmdline())[:80]!r}")
                process.kill()
        return complaints

    def kill(self) -> None:
        """At once and with everything below, as when a machine goes away."""
        kill_tree(self.pid)
        self.wait(STOP_SECONDS)


def start(
    name: str,
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    before: Callable[[], None] | None = None,
) -> Started:
    """Starts a command that writes to `log`; `before` is called in the new process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        popen = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=before,
            process_group=0,  # a Ctrl-C is for us; our session is kept, so that what ends it ends all
        )
    return Started(name, popen, log)


def wait_until(
    what: str,
    processes: Sequence[Started],
    condition: Callable[[], T],
    seconds: float = 60.0,
    every: float = 0.02,
) -> T:
    """The first true value of `condition`; raises StartFailed when a process ends or the time is up."""

    def holds() -> T:
        for process in processes:
            if (code := process.poll()) is not None:
                raise StartFailed(
                    f"{what}: {process.name} ended with {code}, see {process.log}\n{process.last_lines()}"
                )
        return condition()

    try:
        return until(what, holds, seconds, every)
    except NotInTime as exc:
        lines = "\n".join(f"{process.name}:\n{process.last_lines()}" for process in processes)
        raise StartFailed(f"{exc}\n{lines}") from None


def stop(processes: Sequence[Started], seconds: float = STOP_SECONDS) -> list[str]:
    """The last one first: workers say goodbye to a frontend that is there."""
    return [complaint for process in reversed(processes) for complaint in process.stop(seconds=seconds)]


def command_line(process: psutil.Process) -> list[str]:
    """Its words; none of a process that has ended, or is a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def kill_tree(pid: int) -> None:
    """End a process and everything below it at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def survivors(processes: Sequence[psutil.Process], seconds: float = 30.0) -> list[psutil.Process]:
    """Who still runs after that time. A zombie has ended; in some containers nobody collects it."""
    with contextlib.suppress(NotInTime):
        until("their end", lambda: not any(map(_runs, processes)), seconds)
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


_reserved: list[socket.socket] = []
"""Stays open for the life of this process."""


@functools.cache
def _ports() -> Iterator[int]:
    """Ports of this test process alone, in a random order.

    They are below 32768: the system takes none of these for connections, and the runtime wants its system
    server there.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = [*range(20000 + mine, 32000, processes)]
    random.SystemRandom().shuffle(ports)
    return itertools.cycle(ports)


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of some consecutive ports that nobody else is given before their servers listen, which must
    set SO_REUSEADDR."""
    while True:
        first = next(_ports())
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            reserved = [held.enter_context(socket.socket()) for _ in range(count)]
            for offset, one in enumerate(reserved):
                one.bind(("", first + offset))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.pop_all()
            _reserved.extend(reserved)
            return first
