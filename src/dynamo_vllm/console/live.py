"""Sends what is new to the pages that are open, as server-sent events; a slow page misses some."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import StreamingResponse

from dynamo_vllm.console.replies import ConsoleError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from starlette.types import Receive, Scope, Send

MOST_PAGES = 32
MOST_WAITING = 64
"""Events that wait for one page; the oldest goes when there are more."""
BEAT_SECONDS = 15.0
"""Between two signs of life: only what is sent shows that a page has gone."""
BEAT = b": \n\n"
COLLECT_SECONDS, COLLECT_MANY_SECONDS = 0.3, 1.0
"""How long new ones wait for each other; longer after there were too many."""
MOST_COLLECTED = 50
"""More than anybody can read."""


class Page:
    """One open page and what waits for it."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._has_some = asyncio.Event()
        self.is_closed = False

    def put(self, event: bytes) -> None:
        self._waiting.append(event)
        self._has_some.set()

    def close(self) -> None:
        self.is_closed = True
        self._has_some.set()

    async def next(self, seconds: float) -> bytes:
        """Return all that waits, or a sign of life after so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_some.wait()
        except TimeoutError:
            return BEAT
        found = b"".join(self._waiting)
        self._waiting.clear()
        self._has_some.clear()
        return found


class Hub:
    """All open pages."""

    def __init__(self) -> None:
        self._pages: set[Page] = set()
        self._kept: dict[str, deque[object]] = {}
        """The last events of some kinds, for pages that come later."""
        self.on_watch: Callable[[], None] = lambda: None
        """Is called when a page is opened."""

    @property
    def is_watched(self) -> bool:
        return bool(self._pages)

    def publish(self, event: str, value: object, *, keep: int = 0) -> None:
        """Send to every page; the last `keep` events of this kind also go to those that come later."""
        if keep:
            self._kept.setdefault(event, deque(maxlen=keep)).append(value)
        if not self._pages:
            return
        text = encoded(event, value)
        for page in self._pages:
            page.put(text)

    def publish_all(self, event: str, values: Iterable[object]) -> None:
        """Send several at once, which wait or are missed together."""
        text = b"".join(encoded(event, value) for value in values)
        if not text:
            return  # which would look like the end of the stream
        for page in self._pages:
            page.put(text)

    def response(
        self, is_allowed: Callable[[], bool] = lambda: True, beat_seconds: float = BEAT_SECONDS
    ) -> StreamingResponse:
        """Admit a page that opens now and return its answer, which ends when it is no longer allowed."""
        if len(self._pages) >= MOST_PAGES:
            raise ConsoleError(503, f"{MOST_PAGES} pages are open already", "close some")
        page = Page()
        self._pages.add(page)  # pages that open at the same moment count each other
        for event, values in self._kept.items():
            page.put(b"".join(encoded(event, value) for value in values))
        self.on_watch()
        return _PageStream(_events(page, is_allowed, beat_seconds), lambda: self._pages.discard(page))

    def close(self) -> None:
        """End all streams."""
        for page in self._pages:
            page.close()


async def _events(
    page: Page, is_allowed: Callable[[], bool], beat_seconds: float
) -> AsyncGenerator[bytes, None]:
    yield BEAT  # so that the page knows that it is connected
    while not page.is_closed:
        events = await page.next(beat_seconds)
        if not is_allowed():
            return
        yield events


class _PageStream(StreamingResponse):
    """Gives the place of its page back, also if the client left before the first byte."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], leave: Callable[[], None]) -> None:
        super().__init__(events, headers={"x-accel-buffering": "no"})
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class Collector:
    """Sends what comes in quick succession together: of many only the newest, and nothing if nobody looks."""

    def __init__(self, hub: Hub, event: str) -> None:
        self._hub = hub
        self._event = event
        self._waiting: deque[Callable[[], object | None]] = deque(maxlen=MOST_COLLECTED)
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = COLLECT_SECONDS

    def add(self, makers: Iterable[Callable[[], object | None]]) -> None:
        """Take functions that make what is sent; None is not sent."""
        if not self._hub.is_watched:
            return
        self._waiting.extend(makers)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._send)

    def _send(self) -> None:
        self._timer = None
        is_full = len(self._waiting) == MOST_COLLECTED
        self._seconds = COLLECT_MANY_SECONDS if is_full else COLLECT_SECONDS
        made = [value for make in self._waiting if (value := make()) is not None]
        self._waiting.clear()
        self._hub.publish_all(self._event, made)


def encoded(event: str, value: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(value))
