"""Sends guides one after another to one checker process, and replaces the process when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import signal
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.structured_output.checker_processes import Ended
from dynamo_vllm.errors import Overloaded
from dynamo_vllm.forking import CannotFork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from dynamo_vllm.engine.structured_output.checker_processes import CheckerProcess, Source

logger = logging.getLogger(__name__)
MOST_WAITING = {"quick": 64, "slow": 4}
KILLED = Ended(-signal.SIGKILL)


class Lane:
    """Has one checker process and a queue of guides for it; the smallest guide goes first."""

    def __init__(
        self, name: str, source: Source, seconds: float, memory_bytes: int, more_niceness: int = 0
    ) -> None:
        self.seconds = seconds
        self._name = name
        self._source = source
        self._memory_bytes = memory_bytes
        self._more_niceness = more_niceness
        self._checker: CheckerProcess | None = None
        self._starting: asyncio.Future[CheckerProcess] | None = None
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def check(self, text: str) -> dict[str, object]:
        """Returns the checker's answer, or which limit the guide exceeded (`over`): time or memory."""
        line = f'{{"seconds": {self.seconds}, "guide": {text}}}\n'.encode()
        async with self._turn(len(line)):
            answer = await self._ask(line)
            if answer == KILLED:  # perhaps while it was idle, so this guide need not be the cause
                logger.warning("the guide checker of the %s lane was killed; starting another", self._name)
                answer = await self._ask(line)
        if isinstance(answer, Ended):
            return self._meaning(answer)
        return answer

    async def _ask(self, line: bytes) -> dict[str, Any] | Ended:
        checker = await self._ready()
        answer: dict[str, Any] | Ended | None = None
        try:
            answer = await checker.ask(line)
        finally:
            is_fit = isinstance(answer, dict) and not answer.pop("worn", False) and "over" not in answer
            if not is_fit:  # also if this call was cancelled
                self._drop(checker)
        return answer

    def _meaning(self, end: Ended) -> dict[str, object]:
        if end == KILLED:
            raise Overloaded("the guide checker was killed; try again")
        if end.code == -signal.SIGPROF:
            return {"over": "time"}
        # Native code aborts its process when it gets no more memory.
        return {"over": "memory"} if end.code == -signal.SIGABRT else {}

    async def _ready(self) -> CheckerProcess:
        if self._checker is not None and self._checker.is_gone():
            self._drop(self._checker)
        if self._checker is None:
            if self._starting is None:
                start = functools.partial(self._source.checker, self._memory_bytes, self._more_niceness)
                self._starting = in_thread(start)
            starting = self._starting
            try:
                with overloaded_if_unable():
                    self._checker = await asyncio.shield(starting)
            finally:
                if starting.done():
                    self._starting = None
        return self._checker

    def _drop(self, checker: CheckerProcess) -> None:
        self._checker = None
        checker.end()

    @contextlib.asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        if self._is_taken:
            await self._wait(size)
        self._is_taken = True
        try:
            yield
        finally:
            self._wake_next()

    async def _wait(self, size: int) -> None:
        if len(self._waiting) >= MOST_WAITING[self._name]:
            raise Overloaded("too many guides are waiting to be checked; try again")
        mine = asyncio.get_running_loop().create_future()
        entry = (size, next(self._numbers), mine)
        heapq.heappush(self._waiting, entry)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it got its turn at the same moment
                self._wake_next()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def _wake_next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False

    def close(self) -> None:
        if self._checker is not None:
            self._drop(self._checker)
        if self._starting is not None:
            self._starting.add_done_callback(_end_unwanted)


@contextlib.contextmanager
def overloaded_if_unable() -> Iterator[None]:
    """Raises Overloaded if no checker process can be started."""
    try:
        yield
    except CannotFork as exc:
        raise Overloaded(f"guides cannot be checked: {exc}") from exc


def _end_unwanted(starting: asyncio.Future[CheckerProcess]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().end()
