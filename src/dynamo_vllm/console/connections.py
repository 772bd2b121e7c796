"""Closes connections on which no request comes, and that of many which waits longest for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

HEAD_SECONDS = 15.0
MOST_CONNECTIONS = 512
"""Beyond it one that waits for a request is closed for each that comes."""
FRESH_SECONDS = 0.1
"""Of many that come at the same moment none has been read yet, so none of them is closed."""


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for the first request and for the rest of one that has begun.

    It is the one of h11, as that of httptools has no limit for headers.
    """

    _closing: asyncio.TimerHandle | None = None
    _waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._expect_request()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_request()

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    @property
    def _waits_for_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_request(self) -> None:
        """Close the connection soon, unless a request is being answered."""
        if not self._waits_for_request:
            self._stop()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _make_room(self) -> None:
        """Close the connection that has waited longest: whoever has a request sends it at once."""
        if len(self.connections) <= MOST_CONNECTIONS:
            return
        ours = (other for other in self.connections if isinstance(other, Connection))
        waiting = (other for other in ours if other._waits_for_request)  # this one too
        oldest = min(waiting, key=lambda other: other._waits_since)
        if self._waits_since - oldest._waits_since > FRESH_SECONDS:
            self.connections.discard(oldest)  # its end is noticed later, and others come before
            oldest.transport.abort()  # a client that does not read would hold up a close

    def _stop(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
