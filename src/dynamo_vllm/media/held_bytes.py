"""The bytes of media that requests hold until the engine has begun with them: how many, and whose.

A step that makes more of them (fetch, decode, put into a prompt) begins when there is room. Nobody has a
place in a queue while there is none, and the oldest request goes on all the same. So whoever holds something
comes to an end, however large it is, and then others have their turn.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING

from dynamo_vllm.media.admission import FOREVER, give, take

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from dynamo_vllm.media.admission import Clock, Places

_current: ContextVar[Hold | None] = ContextVar("hold", default=None)


class Hold:
    """What one request holds."""

    def __init__(self) -> None:
        self.things: dict[int, object] = {}
        """By identity: requests for the same content share what was decoded."""
        self.memory: MediaMemory | None = None

    def let_go(self) -> None:
        """Of everything; once more does nothing."""
        if self.memory is not None:
            self.memory.let_go(self)


@contextmanager
def held_by_request() -> Iterator[Hold]:
    """Around one request: with it ends what it holds, whatever its end is.

    The hold is not an argument of everything on the way to the loader: each would have to let go on each of
    its ways out.
    """
    hold = Hold()
    _current.set(hold)
    try:
        yield hold
    finally:
        _current.set(None)
        hold.let_go()


@contextmanager
def holding() -> Iterator[Hold]:
    """The hold of the request this is a part of; outside of any, one for this block alone."""
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
        self._held: dict[int, tuple[int, int]] = {}  # of each thing: its bytes, how many hold it
        self._waiting: dict[Hold, asyncio.Event] = {}

    def __len__(self) -> int:
        """How many requests hold something, or want to."""
        return len(self._holds)

    async def take(self, hold: Hold, places: Places, waiting: Clock = FOREVER) -> None:
        """Places for a step that makes more bytes."""
        while True:
            await waiting.spend(self._room(hold))
            await take(places, waiting)
            if self._has_room(hold):
                self._tell(1)  # there may be room for one more
                return
            give(places)

    async def _room(self, hold: Hold) -> None:
        while not self._has_room(hold):
            await self._waiting.setdefault(hold, asyncio.Event()).wait()

    @asynccontextmanager
    async def turn(self, hold: Hold, places: Places, waiting: Clock = FOREVER) -> AsyncIterator[None]:
        await self.take(hold, places, waiting)
        try:
            yield
        finally:
            give(places)

    def _has_room(self, hold: Hold) -> bool:
        self._enter(hold)
        return self.bytes < self._max_bytes or next(iter(self._holds)) is hold

    def _enter(self, hold: Hold) -> None:
        hold.memory = self
        self._holds.setdefault(hold)

    def keep(self, hold: Hold, thing: object, size: int) -> None:
        """Does not wait: the bytes are there."""
        self._enter(hold)
        if id(thing) in hold.things:
            return
        hold.things[id(thing)] = thing
        _, holders = self._held.get(id(thing), (size, 0))
        self._held[id(thing)] = size, holders + 1
        if not holders:
            self.bytes += size

    def drop(self, hold: Hold, thing: object) -> None:
        if hold.things.pop(id(thing), None) is None:
            return
        size, holders = self._held.pop(id(thing))
        if holders > 1:
            self._held[id(thing)] = size, holders - 1
            return
        self.bytes -= size
        self._tell()

    def let_go(self, hold: Hold) -> None:
        for thing in [*hold.things.values()]:
            self.drop(hold, thing)
        if hold in self._holds:
            del self._holds[hold]
            self._waiting.pop(hold, None)
            self._tell()  # another may be the oldest now

    def _tell(self, most: int = 64) -> None:
        """Wakes some who wait, and these others: a thousand at a time, most of them in vain, would hold up
        the event loop."""
        self._wake([*islice(self._holds, 1)])  # the oldest, always: it may be so since a moment ago
        if self.bytes < self._max_bytes:
            self._wake([*islice(self._waiting, most)])

    def _wake(self, holds: list[Hold]) -> None:
        for hold in holds:
            if (event := self._waiting.pop(hold, None)) is not None:
                event.set()
