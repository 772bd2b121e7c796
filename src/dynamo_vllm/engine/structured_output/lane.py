"""Sends guides one after another to one judge process, and replaces it when it has ended."""

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
from dynamo_vllm.engine.structured_output.judge_processes import Ended
from dynamo_vllm.errors import Overloaded
from dynamo_vllm.forking import CannotFork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from dynamo_vllm.engine.structured_output.judge_processes import Judge, Source

logger = logging.getLogger(__name__)
MOST_WAITING = {"quick": 64, "slow": 4}
KILLED = Ended(-signal.SIGKILL)


class Lane:
    """One judge at a time, and the guides that wait for it: the smallest comes first."""

    def __init__(
        self, name: str, source: Source, seconds: float, memory_bytes: int, more_niceness: int = 0
    ) -> None:
        self.seconds = seconds
        self._name = name
        self._source = source
        self._memory_bytes = memory_bytes
        self._more_niceness = more_niceness
        self._judge: Judge | None = None
        self._starting: asyncio.Future[Judge] | None = None
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def judge(self, text: str) -> dict[str, object]:
        """The judge's answer, or what it went over: time, memory."""
        line = f'{{"seconds": {self.seconds}, "guide": {text}}}\n'.encode()
        async with self._turn(len(line)):
            answer = await self._ask(line)
            if answer == KILLED:  # perhaps as it had nothing to do; no fault of this guide
                logger.warning("what judges guides (%s lane) was killed; another follows", self._name)
                answer = await self._ask(line)
        if isinstance(answer, Ended):
            return self._meaning(answer)
        return answer

    async def _ask(self, line: bytes) -> dict[str, Any] | Ended:
        judge = await self._ready()
        answer: dict[str, Any] | Ended | None = None
        try:
            answer = await judge.ask(line)
        finally:
            is_fit = isinstance(answer, dict) and not answer.pop("worn", False) and "over" not in answer
            if not is_fit:  # or whoever asked is gone
                self._drop(judge)
        return answer

    def _meaning(self, end: Ended) -> dict[str, object]:
        if end == KILLED:
            raise Overloaded("the process that judges guides was killed; try again")
        if end.code == -signal.SIGPROF:
            return {"over": "time"}
        # Native code that gets no more memory ends its process.
        return {"over": "memory"} if end.code == -signal.SIGABRT else {}

    async def _ready(self) -> Judge:
        if self._judge is not None and self._judge.is_gone():
            self._drop(self._judge)
        if self._judge is None:
            if self._starting is None:
                start = functools.partial(self._source.judge, self._memory_bytes, self._more_niceness)
                self._starting = in_thread(start)
            starting = self._starting
            try:
                with unable():
                    self._judge = await asyncio.shield(starting)
            finally:
                if starting.done():
                    self._starting = None
        return self._judge

    def _drop(self, judge: Judge) -> None:
        self._judge = None
        judge.end()

    @contextlib.asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        if self._is_taken:
            await self._wait(size)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, size: int) -> None:
        if len(self._waiting) >= MOST_WAITING[self._name]:
            raise Overloaded("too many guides wait to be judged; try again")
        mine = asyncio.get_running_loop().create_future()
        entry = (size, next(self._numbers), mine)
        heapq.heappush(self._waiting, entry)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # its turn came at the same moment
                self._pass_on()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False

    def close(self) -> None:
        if self._judge is not None:
            self._drop(self._judge)
        if self._starting is not None:
            self._starting.add_done_callback(_end_unwanted)


@contextlib.contextmanager
def unable() -> Iterator[None]:
    """Where no judge can be had."""
    try:
        yield
    except CannotFork as exc:
        raise Overloaded(f"guides cannot be judged: {exc}") from exc


def _end_unwanted(starting: asyncio.Future[Judge]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().end()
