"""The process from which `serve` forks its workers: it imports vLLM once for all of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import TYPE_CHECKING

from dynamo_vllm import forking
from dynamo_vllm.config import forks
from dynamo_vllm.engine.process import preload
from dynamo_vllm.forking import CannotFork
from dynamo_vllm.supervise.planning.process import COMMAND
from dynamo_vllm.supervise.process.child import end_with_supervisor, start_from_scratch
from dynamo_vllm.supervise.process.held import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from dynamo_vllm.supervise.planning.process import Process
    from dynamo_vllm.supervise.process.child import RunningProcess

FORKED = "dynamo_vllm.cli.start.forked"
FORK_SECONDS = 60.0
"""Deadline for a zygote that has imported everything; it takes a hundredth of a second."""


class WorkerZygote:
    """Started with the first worker, and again when it has ended."""

    def __init__(
        self, environment: Mapping[str, str], models: Iterable[str], log: Path, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._environment = environment
        self._architectures = sorted({name for model in models for name in preload.architectures_of(model)})
        self._log = log
        self._lock = asyncio.Lock()
        self._running: asyncio.subprocess.Process | None = None
        self._zygote: forking.Zygote | None = None
        self._refusal: str | None = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with this environment may share the zygote's imports."""
        return forks.import_variables(environment) == forks.import_variables(self._environment)

    async def start(self, plan: Process, command: list[str], log: int, status: int) -> RunningProcess:
        """Fork a worker (`child.Start`); if that is not possible, say why and start it from scratch."""
        words = command[len(COMMAND) + 1 :]
        task = forking.Task(f"{FORKED}:run", (words,), dict(plan.env), own_session=True)
        try:
            return Held(await self._fork(task, [log, status]))
        except (CannotFork, OSError, TimeoutError) as exc:
            self._say(f"{plan.name} cannot be forked, so it imports vLLM itself: {exc}")
            return await start_from_scratch(plan, command, log, status)

    async def _fork(self, task: forking.Task, fds: Sequence[int]) -> int:
        async with self._lock:
            if self._refusal is not None:
                raise CannotFork(self._refusal)
            zygote = self._zygote
            if zygote is None or (self._running is not None and self._running.returncode is not None):
                self.close()
                zygote = await self._start()
            with forking.adopting():
                zygote.send(task, fds)
                async with asyncio.timeout(FORK_SECONDS):
                    return forking.parse_pid(await self._line(zygote.connection))

    async def _start(self) -> forking.Zygote:
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as exc:
            raise self._refused("Linux before 5.3 does not report the end of an adopted process") from exc
        ours, theirs = socket.socketpair()
        with self._log.open("ab") as output, theirs:
            self._running = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", preload.MODULE, str(theirs.fileno()), *self._architectures),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environment, **preload.import_environment(self._environment)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=end_with_supervisor(os.getpid()),
            )
        ours.setblocking(False)
        self._zygote = forking.Zygote(ours, self._running.pid)
        refusal = json.loads(await self._line(ours))["refusal"]
        if refusal is not None:
            raise self._refused(str(refusal))
        return self._zygote

    def _refused(self, why: str) -> CannotFork:
        """Give up forking for good: imports and the machine do not change."""
        self._refusal = why
        return CannotFork(why)

    async def _line(self, connection: socket.socket) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            more = await asyncio.get_running_loop().sock_recv(connection, 4096)
            if not more:
                raise CannotFork(f"the zygote ended, see {self._log}")
            line += more
        return line

    def close(self) -> None:
        """It ends when nobody holds the other end of its connection; asyncio reads its exit."""
        if self._zygote is not None:
            self._zygote.connection.close()
            self._zygote = None
