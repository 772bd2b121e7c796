"""Starts the processes that check guides, and communicates with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_vllm import forking
from dynamo_vllm.engine.process import preload
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.structured_output import checker_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Made = TypeVar("Made")
logger = logging.getLogger(__name__)
START_SECONDS = 300.0
"""The limit for a process that imports vLLM and loads a tokenizer."""
FORK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Ended:
    """Reports a checker process that ended without an answer."""

    code: int
    """The exit code; a negative number is the signal that ended the process."""


class CheckerProcess:
    """Is one process that checks guides, a child of the worker."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        connection.setblocking(False)
        self._is_asked = False
        self._is_over = False
        self._exit: asyncio.Future[int] | None = None

    async def ask(self, line: bytes) -> dict[str, Any] | Ended:
        """Returns the answer to one guide.

        A caller that stops waiting must end the process: the next caller would get this answer.
        """
        self._is_asked = True
        try:
            return await self._answer(line)
        except ConnectionError:
            return Ended(await asyncio.shield(self._ended()))
        finally:
            self._is_asked = False
            if self._is_over:
                self._close()

    async def _answer(self, line: bytes) -> dict[str, object]:
        loop = asyncio.get_running_loop()
        answer = bytearray()
        await loop.sock_sendall(self._connection, line)
        while not answer.endswith(b"\n"):
            if not (more := await loop.sock_recv(self._connection, 1 << 16)):
                raise ConnectionError
            answer += more
        found: dict[str, object] = json.loads(answer)
        return found

    def is_gone(self) -> bool:
        """Returns whether the process ended while it was idle."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> None:
        """Kills the process at once, even if somebody waits for its answer. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if self._exit is None:  # otherwise the pid may belong to another process by now
            os.kill(self.pid, signal.SIGKILL)
            self._ended()
        if not self._is_asked:  # otherwise `ask` closes the connection
            self._close()

    def _close(self) -> None:
        # Only after the event loop has removed the descriptor: its number may be reused at once.
        asyncio.get_running_loop().call_soon(self._connection.close)

    def _ended(self) -> asyncio.Future[int]:
        """Returns the future of the exit code, which can be read only once from the kernel."""
        if self._exit is None:
            self._exit = in_thread(lambda: os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))
        return self._exit


class Source:
    """Is the process that checkers are forked from; it is restarted if it ends. All its methods block."""

    def __init__(self, call: str, payload: bytes, environment: Mapping[str, str]) -> None:
        self._call = call
        self._payload = payload
        self._environment = environment
        self._lock = threading.Lock()
        self._zygote: forking.Zygote | None = None
        self._is_ready = False
        self._is_closed = False
        self._refusal: str | None = None

    def fork_from(self, zygote: forking.Zygote) -> None:
        """Starts the process as a fork of one that has imported vLLM; it loads while other parts start."""
        ours, theirs = socket.socketpair()
        task = forking.Task(
            f"{checker_child.MODULE}:run", (self._call, self._payload), self._environment, signal.SIGKILL
        )
        with theirs:
            try:
                pid = zygote.fork(task, [theirs.fileno()])
            except forking.CannotFork:
                ours.close()
                raise
        self._zygote = forking.Zygote(ours, pid)

    @property
    def is_loaded(self) -> bool:
        """Returns whether checkers can be forked at once."""
        return self._is_ready

    def load(self) -> None:
        """Waits until checkers can be forked. Raises CannotFork."""
        with self._lock:
            self._check_open()
            self._guarded(self._wait_ready, self._zygote or self._start_new())

    def checker(self, memory_bytes: int, more_niceness: int) -> CheckerProcess:
        """Forks a new checker. Raises CannotFork."""
        with self._lock:
            self._check_open()
            if self._zygote is not None:
                try:
                    return self._checker(self._zygote, memory_bytes, more_niceness)
                except forking.CannotFork:
                    if self._is_closed or self._refusal is not None:
                        raise
            return self._checker(self._start_new(), memory_bytes, more_niceness)

    def _check_open(self) -> None:
        if self._is_closed or self._refusal is not None:
            raise forking.CannotFork(self._refusal or "the engine is closed")

    def _checker(self, zygote: forking.Zygote, memory_bytes: int, more_niceness: int) -> CheckerProcess:
        self._guarded(self._wait_ready, zygote)
        return self._guarded(self._fork, zygote, memory_bytes, more_niceness)

    def _guarded(self, work: Callable[..., Made], *args: object) -> Made:
        try:
            return work(*args)
        except (forking.CannotFork, OSError, ValueError) as exc:
            self._end()
            if not self._is_closed and self._refusal is None:
                logger.warning("the process that guide checkers are forked from has ended: %s", exc)
            raise forking.CannotFork(str(exc)) from exc

    def _start_new(self) -> forking.Zygote:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", checker_child.MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**self._environment, **preload.ONE_THREAD},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        process.returncode = 0  # Zygote.close waits for the process, so Popen must not
        self._zygote = forking.Zygote(ours, process.pid)
        with contextlib.suppress(OSError):  # if the process has ended, `_wait_ready` reports it
            ours.sendall(checker_child.start_message(self._call, self._payload))
        return self._zygote

    def _wait_ready(self, zygote: forking.Zygote) -> None:
        if self._is_ready:
            return
        zygote.connection.settimeout(START_SECONDS)
        said = b""
        while not said.endswith(b"\n"):
            if not (more := zygote.connection.recv(4096)):
                raise forking.CannotFork("the process that guide checkers are forked from failed to start")
            said += more
        self._refusal = json.loads(said)["refusal"]
        if self._refusal is not None:  # permanent: another attempt would fail in the same way
            logger.error("guides cannot be checked, so all are refused: %s", self._refusal)
            raise forking.CannotFork(self._refusal)
        zygote.connection.settimeout(FORK_SECONDS)
        self._is_ready = True

    def _fork(self, zygote: forking.Zygote, memory_bytes: int, more_niceness: int) -> CheckerProcess:
        ours, theirs = socket.socketpair()
        task = forking.Task(
            f"{checker_child.MODULE}:check_all",
            (memory_bytes, more_niceness),
            self._environment,
            signal.SIGKILL,
        )
        with theirs:
            try:
                return CheckerProcess(zygote.fork(task, [theirs.fileno()]), ours)
            except BaseException:
                ours.close()
                raise

    def close(self) -> None:
        """Ends the process; callers that wait for it get CannotFork."""
        self._is_closed = True
        if (zygote := self._zygote) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(zygote.pid, signal.SIGKILL)
        with self._lock:
            self._end()

    def _end(self) -> None:
        zygote, self._zygote, self._is_ready = self._zygote, None, False
        if zygote is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(zygote.pid, signal.SIGKILL)
            zygote.close()
