"""Listens on the control socket of `serve`; a request that has begun is carried out to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.supervise.control import messages
from dynamo_vllm.supervise.control.messages import ControlError, Report, Request

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)
Perform = Callable[[Request, Report], Awaitable[dict[str, Any]]]
LINE_SECONDS = 10.0
"""For the request of a client that has connected."""
SEND_SECONDS = 10.0
"""For a client that does not read its last line."""
MOST_CLIENTS = 64
STOPPING = ControlError(messages.REFUSED, "serve is stopping")


async def listen(path: Path, perform: Perform) -> None:
    """Answer until this is cancelled; an OSError if the socket cannot be opened."""
    clients: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(reader, writer, perform)
        is_full = len(clients) >= MOST_CLIENTS
        task = asyncio.get_running_loop().create_task(client.refuse() if is_full else client.run())
        clients.add(task)
        task.add_done_callback(clients.discard)

    server = await asyncio.start_unix_server(connected, sock=_bound(path), limit=messages.MAX_LINE_BYTES)
    try:
        await asyncio.get_running_loop().create_future()  # until cancelled
    finally:
        server.close()
        for task in clients:
            task.cancel()
        if clients:
            await asyncio.wait(clients)
        _unlink(path)


def _bound(path: Path) -> socket.socket:
    """Return a socket at this path that is only this user's, from its first moment on."""
    _unlink(path)
    made = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError:
        made.close()
        raise
    finally:
        os.umask(before)
    return made


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


class _Client:
    """One connection, with one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, perform: Perform) -> None:
        self._reader = reader
        self._writer = writer
        self._perform = perform

    async def run(self) -> None:
        try:
            await self._answer()
        except asyncio.CancelledError:
            self._fail(STOPPING)
            raise
        finally:
            self._writer.close()

    async def refuse(self) -> None:
        self._fail(ControlError(messages.BUSY, f"{MOST_CLIENTS} clients are connected; try again later"))
        self._writer.close()

    async def _answer(self) -> None:
        try:
            request = messages.decode(await self._line())
            result = await self._perform(request, lambda progress: self._send({"progress": progress}))
        except ControlError as exc:
            self._fail(exc)
        except DynamoVllmError as exc:
            self._fail(ControlError(messages.REFUSED, str(exc)))
        except Exception as exc:  # a mistake of ours must not end serve
            logger.exception("a request on the control socket failed")
            self._fail(ControlError(messages.FAILED, f"{type(exc).__name__}: {exc}"))
        else:
            self._send({"result": result})
        with contextlib.suppress(OSError, TimeoutError):  # the client has gone, or does not read
            async with asyncio.timeout(SEND_SECONDS):
                await self._writer.drain()

    async def _line(self) -> bytes:
        try:
            async with asyncio.timeout(LINE_SECONDS):
                line = await self._reader.readline()
        except TimeoutError:
            raise ControlError(messages.BAD_REQUEST, f"no request came within {LINE_SECONDS:.0f} s") from None
        except (ValueError, OSError) as exc:
            raise ControlError(
                messages.BAD_REQUEST, f"{exc}; a request has at most {messages.MAX_LINE_BYTES} bytes"
            ) from None
        if not line.endswith(b"\n"):
            raise ControlError(messages.BAD_REQUEST, "the line has no end; finish it with a newline")
        return line

    def _fail(self, exc: ControlError) -> None:
        self._send({"error": {"kind": exc.kind, "message": str(exc)}})

    def _send(self, message: dict[str, Any]) -> None:
        """Nobody waits for a client: one that does not read misses what does not fit."""
        transport = self._writer.transport
        if not transport.is_closing() and transport.get_write_buffer_size() < messages.MAX_LINE_BYTES:
            self._writer.write(messages.encode(message))
