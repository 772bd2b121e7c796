"""Closes connections on which no request comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

HEAD_SECONDS = 15.0


class Connection(H11Protocol):
    """uvicorn's, which waits for ever for the first request and for the rest of one that has begun.

    It is the one of h11, as that of httptools has no limit for headers.
    """

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        """Close the connection soon, unless a request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
