"""Receives the frontends' records of ended requests, as log records of OpenTelemetry over HTTP.

Only the few fields that are needed are read from the Protocol Buffers message. The path has a secret part:
other users of this machine must not add requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import logging
import secrets
import zlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11
import msgspec

from dynamo_vllm.serving.watch import request_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dynamo_vllm.serving.watch.request_trace import Sender

logger = logging.getLogger(__name__)
MAX_BYTES = 16 << 20
"""The largest batch; the exporter sends at most 512 records at once."""
READ_BYTES = 1 << 20
"""Read at once; a batch has some hundred kilobytes."""
MOST_CONNECTIONS, MOST_UNKNOWN = 32, 64
"""Of frontends, and of who has not sent the secret path yet; of these the oldest is closed for a new one."""
IDLE_SECONDS, HEAD_SECONDS = 120.0, 10.0
"""How long a frontend may take for the next request, and a new connection for the head of its first."""
SCOPE = b"dynamo.request_trace"
_PAYLOAD = b"\x0a\x07payload"
"""The key of an attribute, which is its first field."""
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_BROKEN_OFF = (ConnectionError, TimeoutError, asyncio.IncompleteReadError)


class Malformed(Exception):
    """This is not an export of logs."""


class Unread(msgspec.Struct, frozen=True, gc=False):
    """A record that is still to be read: where it is in an export."""

    export: bytes
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Return how many bytes it takes."""
        return self.end - self.begin

    def payload(self) -> bytes:
        """Return its JSON; raise Malformed if there is none."""
        for attribute in _fields(self.export, self.begin, self.end, 6):
            if self.export.startswith(_PAYLOAD, attribute[0]):
                for value in _fields(self.export, *attribute, 2):
                    for first, last in _fields(self.export, *value, 1):
                        return self.export[first:last]
        raise Malformed("a record without a payload")


class Receiver:
    """Calls `take` with the sender and the records of each export."""

    def __init__(self, url: str, take: Callable[[Sender, Sequence[Unread]], None]) -> None:
        self._url = urlsplit(url)
        self._take = take
        self._known: set[asyncio.Task[None]] = set()
        self._unknown: dict[asyncio.Task[None], None] = {}
        """The oldest first."""

    async def run(self) -> None:
        """Listen until cancelled; raise OSError if the port is taken."""
        server = await asyncio.start_server(
            self._accept, self._url.hostname, self._url.port, limit=READ_BYTES
        )
        try:
            async with server:
                await server.serve_forever()
        finally:
            tasks = [*self._known, *self._unknown]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unknown) >= MOST_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._unknown[task] = None
        task.add_done_callback(functools.partial(self._end, writer))

    def _end(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        """Close the connection; a task that is cancelled before it begins could not."""
        writer.close()
        self._unknown.pop(task, None)
        self._known.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        seconds = HEAD_SECONDS
        with contextlib.suppress(*_BROKEN_OFF, h11.ProtocolError):
            while connection.our_state is h11.IDLE:
                async with asyncio.timeout(seconds) as limit:
                    status = await self._answer_one(connection, reader, limit)
                seconds = IDLE_SECONDS
                if status is None:
                    return
                head = h11.Response(status_code=status, headers=[("Content-Length", "0")])
                writer.write((connection.send(head) or b"") + (connection.send(h11.EndOfMessage()) or b""))
                await writer.drain()
                if status != 200 or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()

    async def _answer_one(
        self, connection: h11.Connection, reader: asyncio.StreamReader, limit: asyncio.Timeout
    ) -> int | None:
        """Return the status; None if the sender has closed."""
        request: h11.Request | None = None
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
                if (refused := self._refusal(request) or self._admit()) is not None:
                    return refused
                limit.reschedule(asyncio.get_running_loop().time() + IDLE_SECONDS)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BYTES:
                    return 413
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return self._read(request, bytes(body))
            else:
                return None

    def _refusal(self, request: h11.Request) -> int | None:
        path = urlsplit(request.target).path
        expected = f"{self._url.path}{request_trace.PATH}".encode()
        if not secrets.compare_digest(path, expected):
            return 404
        return None if request.method == b"POST" else 405

    def _admit(self) -> int | None:
        """Count this connection as that of a frontend; return a status if there are too many."""
        task = asyncio.current_task()
        assert task is not None
        self._unknown.pop(task, None)
        if task not in self._known and len(self._known) >= MOST_CONNECTIONS:
            return 503
        self._known.add(task)
        return None

    def _read(self, request: h11.Request, body: bytes) -> int:
        try:
            if dict(request.headers).get(b"content-encoding") == b"gzip":
                body = _unpacked(body)
            sender = request_trace.sender(urlsplit(request.target).query.decode("ascii", "replace"))
            self._take(sender, records(body))
        except Malformed as exc:
            logger.warning("a record of requests cannot be read: %s", exc)
            return 400
        return 200


def _unpacked(body: bytes) -> bytes:
    try:
        unpacker = zlib.decompressobj(wbits=31)
        found = unpacker.decompress(body, MAX_BYTES)
    except (zlib.error, gzip.BadGzipFile) as exc:
        raise Malformed(str(exc)) from None
    if unpacker.unconsumed_tail:
        raise Malformed("it is too large")
    return found


def records(body: bytes) -> list[Unread]:
    """Return the records of ended requests in an ExportLogsServiceRequest, each still to be read.

    Hundreds come at once, and most are never looked at.
    """
    found: list[Unread] = []
    for resource_logs in _fields(body, 0, len(body), 1):
        for scope_logs in _fields(body, *resource_logs, 2):
            scope = next(_fields(body, *scope_logs, 1), (0, 0))
            if any(body[begin:end] == SCOPE for begin, end in _fields(body, *scope, 1)):
                found += [Unread(body, begin, end) for begin, end in _fields(body, *scope_logs, 2)]
    return found


def _fields(message: bytes, at: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Yield where the fields of this number that have a length begin and end."""
    wanted = wanted << 3 | _BYTES
    try:
        while at < end:
            key = message[at]
            at += 1
            if key > 127:
                key, at = _varint(message, at - 1)
            kind = key & 7
            if kind == _BYTES:
                length = message[at]
                at += 1
                if length > 127:
                    if (more := message[at]) < 128:
                        length, at = length & 127 | more << 7, at + 1
                    else:
                        length, at = _varint(message, at - 1)
                if key == wanted:
                    yield at, at + length
                at += length
            elif kind == _FIXED_64:
                at += 8
            elif kind == _VARINT:
                _, at = _varint(message, at)
            elif kind == _FIXED_32:
                at += 4
            else:
                raise Malformed(f"a field of kind {kind}")
    except IndexError:
        at = -1
    if at != end:
        raise Malformed("it ends within a field")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while shift < 64:
        byte = message[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
    raise Malformed("a number is too long")
