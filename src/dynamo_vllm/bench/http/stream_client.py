"""Sends requests to one server over a pool of kept-alive connections."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from dynamo_vllm.bench.http.answers import Answer
from dynamo_vllm.bench.http.connection import Connection, Stale
from dynamo_vllm.bench.http.target import tls_context

if TYPE_CHECKING:
    from dynamo_vllm.bench.http.target import Target


class StreamClient:
    """A pool of connections to one server. A failed request returns an answer with an error; none raises."""

    def __init__(self, target: Target, path: str, timeout: float) -> None:
        self._target = target
        self._head = target.head(path)
        self._timeout = timeout
        self._tls = tls_context(target.host) if target.tls else None
        self._idle: list[Connection] = []
        self._is_aborted = False
        self._busy: dict[Connection, asyncio.TimerHandle] = {}

    async def open(self, count: int) -> None:
        """Open connections until this many are idle."""
        missing = count - len(self._idle)
        self._idle += await asyncio.gather(*(self._connect() for _ in range(missing)))

    async def ask(self, body: bytes, keep_text: bool = False) -> Answer:
        """Send a request and return its answer. Its time includes opening a connection, if none is idle."""
        begun = time.monotonic()
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while True:
            try:
                connection = self._idle.pop() if self._idle else await self._connect()
            except OSError as exc:
                return Answer(sent=begun, ended=time.monotonic(), error=f"cannot connect: {_reason(exc)}")
            if self._is_aborted:  # while it connected
                connection.close()
                return Answer(sent=begun, ended=time.monotonic(), aborted=True)
            try:
                answer = await self._ask(connection, request, keep_text)
            except Stale:
                continue
            answer.sent = begun
            return answer

    async def _ask(self, connection: Connection, request: bytes, keep_text: bool) -> Answer:
        loop = asyncio.get_running_loop()
        self._busy[connection] = loop.call_later(self._timeout, self._check_silence, connection)
        try:
            return await connection.ask(request, keep_text)
        finally:
            self._busy.pop(connection).cancel()
            if not connection.closed:
                self._idle.append(connection)

    def _check_silence(self, connection: Connection) -> None:
        """End a request whose server has sent nothing for the timeout."""
        silent = time.monotonic() - connection.last_read
        if silent >= self._timeout:
            connection.fail(f"the server sent nothing for {self._timeout:g} s")
            return
        loop = asyncio.get_running_loop()
        self._busy[connection] = loop.call_later(self._timeout - silent, self._check_silence, connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        host = self._target.host
        async with asyncio.timeout(self._timeout):
            _, made = await loop.create_connection(Connection, host, self._target.port, ssl=self._tls)
        return made

    @property
    def events(self) -> int:
        """How many tokens of the requests in flight have arrived."""
        return sum(connection.events for connection in self._busy)

    @property
    def in_flight(self) -> int:
        return len(self._busy)

    def abort(self) -> None:
        """End every request in flight, also those that still connect. The client sends no more requests."""
        self._is_aborted = True
        for connection in list(self._busy):
            connection.abort()

    def close(self) -> None:
        for connection in (*self._busy, *self._idle):
            connection.close()
        self._idle.clear()


def _reason(exc: OSError) -> str:
    if exc.errno is not None and exc.errno > 0:
        return os.strerror(exc.errno)
    return exc.strerror or str(exc) or type(exc).__name__
