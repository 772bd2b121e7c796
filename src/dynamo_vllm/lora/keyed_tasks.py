"""Runs tasks one at a time per key, in the order of their submission; a started task always completes."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_vllm.errors import WrongState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable

T = TypeVar("T")


class Acts:
    """The tasks run independently of their callers: a caller that disconnects stops none."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._running: set[asyncio.Task[Any]] = set()
        self._latest: dict[str, tuple[Hashable, asyncio.Task[Any]]] = {}

    async def join(self, name: str, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the latest task of the name if it has this key, otherwise start a new one."""
        latest, task = self._latest.get(name, (None, None))
        if task is None or latest != key:
            task = asyncio.create_task(start(), name=f"adapter {name}")
            self._running.add(task)
            self._latest[name] = (key, task)
            task.add_done_callback(lambda done: self._forget(name, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise WrongState("the worker is ending") from None
            raise

    def lock(self, name: str) -> asyncio.Lock:
        """Allows one task at a time; exists while somebody holds it or waits for it."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def changing(self) -> str | None:
        """Return the name of an adapter with a running task."""
        return next(iter(self._latest), None)

    async def cancel(self) -> None:
        """Return when all have ended."""
        running = list(self._running)
        for act in running:
            act.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _forget(self, name: str, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # all callers may be gone; the entry keeps the reason
        if name in self._latest and self._latest[name][1] is task:
            del self._latest[name]
