"""Connects to the frontend for httpx, with less work per chunk and per connection than httpcore.

httpcore 1.0 looks at all connections of its pool for every request, and parses in Python. A gateway has a
connection for every stream that passes through it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import httptools
import httpx

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

MOST_IDLE = 64
IDLE_SECONDS = 4.0
UNREAD_BYTES = 1 << 18
"""From here on the frontend waits until the client has read."""


class Transport(httpx.AsyncBaseTransport):
    """Give it to an httpx.AsyncClient; https needs a context for TLS."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limits: dict[str, float | None] = request.extensions.get("timeout", {})
        body = await request.aread()
        connection = await self._connected(request, limits.get("connect"))
        connection.read_seconds = limits.get("read")
        try:
            connection.send(_head(request) + body)
            status, headers = await connection.head()
        except BaseException:
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Stream(self, connection))

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def give_back(self, connection: _Connection) -> None:
        idle = self._idle.setdefault(connection.place, [])
        now = time.monotonic()
        if not connection.is_reusable or len(idle) >= MOST_IDLE:
            connection.close()
        else:
            connection.idle_since = now
            idle.append(connection)
        if idle and now - idle[0].idle_since > IDLE_SECONDS:
            idle.pop(0).close()

    async def _connected(self, request: httpx.Request, seconds: float | None) -> _Connection:
        url = request.url
        if url.scheme != "http" and self._tls is None:
            raise httpx.UnsupportedProtocol("an https frontend needs a context for TLS", request=request)
        place = (url.host, url.port or (443 if url.scheme == "https" else 80))
        idle = self._idle.get(place, [])
        while idle:
            connection = idle.pop()
            if connection.is_reusable and time.monotonic() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.close()
        tls = self._tls if url.scheme == "https" else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, made = await loop.create_connection(lambda: _Connection(place), *place, ssl=tls)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection to {url.host} within {seconds} s") from None
        except OSError as exc:
            raise httpx.ConnectError(str(exc)) from exc
        return made


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place
        self.idle_since = 0.0
        self.read_seconds: float | None = None
        self._transport: asyncio.Transport | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_head = False
        self._is_complete = False
        self._keeps_alive = False
        self._error: Exception | None = None
        self._chunks: list[bytes] = []
        self._unread = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_reusable(self) -> bool:
        transport = self._transport
        is_open = transport is not None and not transport.is_closing()
        return is_open and self._is_complete and self._keeps_alive and not self._chunks

    def send(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise httpx.WriteError("the connection is closed")
        self._begin()
        self._transport.resume_reading()
        self._transport.write(data)

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        while not self._has_head:
            await self._more()
        return self._parser.get_status_code(), self._headers

    async def chunk(self) -> bytes:
        """Return what came since the last time; nothing at the end."""
        while not self._chunks and not self._is_complete:
            await self._more()
        found = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        if self._unread > UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._unread = 0
        return found

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if self.read_seconds is None:
                await self._waiter
            else:
                async with asyncio.timeout(self.read_seconds):
                    await self._waiter
        except TimeoutError:
            raise httpx.ReadTimeout(f"nothing came within {self.read_seconds} s") from None
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the event loop calls.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(httpx.RemoteProtocolError(f"this is not HTTP: {exc}"))
            self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_complete:
            if self._has_head and exc is None and self._ends_with_connection():
                self._is_complete = True
            else:
                self._fail(httpx.ReadError("the connection ended before the answer was complete"))
        self._wake()

    def _ends_with_connection(self) -> bool:
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._headers = []
        else:
            self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._unread += len(body)
        if self._unread > UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()


class _Stream(httpx.AsyncByteStream):
    """The body of an answer; its connection is closed unless all was read."""

    def __init__(self, owner: Transport, connection: _Connection) -> None:
        self._owner = owner
        self._connection: _Connection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (connection := self._connection) is not None and (chunk := await connection.chunk()):
            yield chunk

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._owner.give_back(connection)


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % (name, value) for name, value in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])
