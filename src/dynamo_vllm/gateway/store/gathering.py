"""Does many small pieces of work together: what waits while the database works is one transaction."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from dynamo_vllm.gateway.database import DatabaseAway

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.gateway.database import Database, Transaction

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_TOGETHER = 512


class Gathered(Generic[Item, Result]):
    """Calls a function with all items that wait. It belongs to one event loop.

    If that fails, each item is tried alone, so that one of them cannot make the others fail. A few
    statements for hundreds of items are much faster than a few for each, above all over a network.
    """

    def __init__(
        self,
        database: Database,
        work: Callable[[Transaction, list[Item]], list[Result]],
        when_nobody_waits: Callable[[Item, Result], None] = lambda item, result: None,
    ) -> None:
        self._database = database
        self._work = work
        self._when_nobody_waits = when_nobody_waits
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        """Return the result of one item, once it is committed."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._when_nobody_waits(item, future.result())  # it came at the same moment
            raise

    async def _run(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
                await self._do(some)
        finally:
            self._task = None

    async def _do(self, some: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        items = [item for item, _ in some]
        try:
            results = await self._database.run(lambda t: self._work(t, items), exclusive=True)
        except Exception as exc:
            if len(some) == 1 or isinstance(exc, DatabaseAway):
                for _, future in some:
                    if not future.done():
                        future.set_exception(exc)
                return
            for pair in some:
                await self._do([pair])
            return
        except BaseException:  # the loop ends
            for _, future in some:
                future.cancel()
            raise
        for (item, future), result in zip(some, results, strict=True):
            if future.done():
                self._when_nobody_waits(item, result)
            else:
                future.set_result(result)
