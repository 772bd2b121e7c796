"""Forks workers and frontends from a process that has imported most of what they import.

Not the runtime: it reads settings of its log while it is imported. Engines of vLLM come from `harness.warm`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_vllm import forking
from harness.hosts import Host
from harness.waiting import until

TESTS = Path(__file__).parents[1]
RUN_COMMAND = "dynamo_vllm.cli.main:run_command"
COMMANDS = ("worker", "frontend")
PACKAGES = ("admin", "codec", "config", "engine.fake", "kv", "lora", "media", "roles", "serving")
OTHERS = ("httpx", "numpy", "pydantic", "uvloop")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
READY = b"ready"


@dataclass
class Forked:
    """A child that a zygote forked for us."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout: float) -> int:
        until(f"the end of {self.pid}", lambda: self.poll() is not None, timeout)
        assert self.code is not None
        return self.code


def fork(
    inner: forking.Zygote,
    call: str,
    args: Sequence[Any],
    env: Mapping[str, str],
    log: Path,
    host: Host | None = None,
) -> Forked:
    """Call `module:function` in a process forked from a zygote that can import `harness`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        task = forking.Task(
            call="harness.zygote:run",
            args=(call, tuple(args), host.namespace if host else None),
            env=dict(env),
            end_signal=signal.SIGKILL,
            own_session=True,
        )
        return Forked(inner.fork(task, [output.fileno()]))


def start(
    command: str, args: Sequence[str], env: Mapping[str, str], log: Path, host: Host | None = None
) -> Forked:
    """Run `dynamo-vllm worker` or `frontend`."""
    return fork(_zygote(), RUN_COMMAND, (f"dynamo_vllm.cli.start.{command}", list(args)), env, log, host)


@functools.cache
def _zygote() -> forking.Zygote:
    """The zygote of this test process, which ends with it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=TESTS,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    assert ours.recv(len(READY)) == READY, "the zygote ended"
    atexit.register(_end, ours, process)
    return forking.Zygote(ours, process.pid)


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait(60)


def preload() -> None:
    """Import what does not import the runtime."""
    sys.modules["dynamo"] = None  # type: ignore[assignment]  # an import of it fails
    for package in PACKAGES:
        folder = importlib.import_module(f"dynamo_vllm.{package}")
        for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            _try_import(module.name)
    for name in (*OTHERS, *(f"dynamo_vllm.cli.start.{command}" for command in COMMANDS)):
        _try_import(name)
    del sys.modules["dynamo"]


def _try_import(name: str) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


if __name__ == "__main__":
    connection, owner = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    preload()
    threads = forking.other_threads()
    assert not threads, threads
    connection.sendall(READY)
    forking.serve(connection, owner)
