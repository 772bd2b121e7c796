"""Counts the bytes of media that requests hold until the engine has started them.

A step that needs more of them (fetch, decode, process) starts when there is room. Waiting requests hold no
place in a queue, and the oldest request always continues. So every request that holds something finishes,
however large it is, and then others follow.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING

from dynamo_vllm.media.admission import UNLIMITED, acquire_all, release_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from dynamo_vllm.media.admission import Slots, TimeBudget

_current: ContextVar[Hold | None] = ContextVar("hold", default=None)


class Hold:
    """What one request holds."""

    def __init__(self) -> None:
        self.items: dict[int, object] = {}
        """By identity: requests with the same content share the decoded media."""
        self.memory: MediaMemory | None = None

    def release(self) -> None:
        """Release everything; idempotent."""
        if self.memory is not None:
            self.memory.release(self)


@contextmanager
def held_by_request() -> Iterator[Hold]:
    """Around one request: releases what it holds when it ends, in any way.

    The hold is not a parameter of everything on the way to the loader: each would have to release it on each
    of its exits.
    """
    hold = Hold()
    _current.set(hold)
    try:
        yield hold
    finally:
        _current.set(None)
        hold.release()


@contextmanager
def holding() -> Iterator[Hold]:
    """The hold of the current request; outside of any, one for this block alone."""
    hold = _current.get()
    if hold is not None:
        yield hold
        return
    with held_by_request() as hold:
        yield hold


class MediaMemory:
    """Used in one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes = 0
        self._holds: dict[Hold, None] = {}  # the oldest first
        self._held: dict[int, tuple[int, int]] = {}  # of each item: its bytes, how many hold it
        self._waiting: dict[Hold, asyncio.Event] = {}

    def __len__(self) -> int:
        """Return how many requests hold something, or want to."""
        return len(self._holds)

    async def take(self, hold: Hold, slots: Slots, waiting: TimeBudget = UNLIMITED) -> None:
        """Wait for room before a step that needs more bytes."""
        while True:
            await waiting.spend(self._room(hold))
            await acquire_all(slots, waiting)
            if self._has_room(hold):
                self._wake_waiters(1)  # there may be room for one more
                return
            release_all(slots)

    async def _room(self, hold: Hold) -> None:
        while not self._has_room(hold):
            await self._waiting.setdefault(hold, asyncio.Event()).wait()

    @asynccontextmanager
    async def turn(self, hold: Hold, slots: Slots, waiting: TimeBudget = UNLIMITED) -> AsyncIterator[None]:
        await self.take(hold, slots, waiting)
        try:
            yield
        finally:
            release_all(slots)

    def _has_room(self, hold: Hold) -> bool:
        self._enter(hold)
        return self.bytes < self._max_bytes or next(iter(self._holds)) is hold

    def _enter(self, hold: Hold) -> None:
        hold.memory = self
        self._holds.setdefault(hold)

    def keep(self, hold: Hold, item: object, size: int) -> None:
        """Count bytes without waiting: they exist already."""
        self._enter(hold)
        if id(item) in hold.items:
            return
        hold.items[id(item)] = item
        _, holders = self._held.get(id(item), (size, 0))
        self._held[id(item)] = size, holders + 1
        if not holders:
            self.bytes += size

    def drop(self, hold: Hold, item: object) -> None:
        if hold.items.pop(id(item), None) is None:
            return
        size, holders = self._held.pop(id(item))
        if holders > 1:
            self._held[id(item)] = size, holders - 1
            return
        self.bytes -= size
        self._wake_waiters()

    def release(self, hold: Hold) -> None:
        for item in [*hold.items.values()]:
            self.drop(hold, item)
        if hold in self._holds:
            del self._holds[hold]
            self._waiting.pop(hold, None)
            self._wake_waiters()  # another may be the oldest now

    def _wake_waiters(self, most: int = 64) -> None:
        """Wake some waiters, and these in turn others: waking a thousand at once, most in vain, would block
        the event loop."""
        self._wake([*islice(self._holds, 1)])  # always the oldest: it may have become so just now
        if self.bytes < self._max_bytes:
            self._wake([*islice(self._waiting, most)])

    def _wake(self, holds: list[Hold]) -> None:
        for hold in holds:
            if (event := self._waiting.pop(hold, None)) is not None:
                event.set()
