"""A web server on loopback that behaves as badly as a test asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class BadServer:
    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[bytes] = field(default_factory=list)
    """Heads, as they came."""
    peers_gone: list[str] = field(default_factory=list)
    """Paths whose client left before the end."""

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def serve(self, path: str, answer: Answer) -> str:
        self.answers[path] = answer
        return self.url(path)

    def file(self, path: str, body: bytes, *headers: str) -> str:
        return self.serve(path, whole(body, *headers))

    def redirect(self, path: str, to: str, status: int = 302) -> str:
        return self.serve(path, head(f"{status} Found", f"Location: {to}", "Content-Length: 0"))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = ""
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(request)
                path = request.split(b" ", 2)[1].decode()
                await self.answers[path](writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.peers_gone.append(path)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def bad_server() -> AsyncIterator[BadServer]:
    made = BadServer()
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(made._handle(reader, writer))
        handlers.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


def head(status: str, *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode())

    return answer


def whole(body: bytes, *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", f"Content-Length: {len(body)}", *headers)(writer)
        writer.write(body)

    return answer


def chunked(chunk: bytes, count: int | None = None, pause: float = 0.0) -> Answer:
    """`count` chunks, or chunks without end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", "Transfer-Encoding: chunked")(writer)
        sent = 0
        while count is None or sent < count:
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
            await asyncio.sleep(pause)
            sent += 1
        writer.write(b"0\r\n\r\n")

    return answer


def drip(body: bytes, pause: float) -> Answer:
    """Announced in full, sent byte by byte."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", f"Content-Length: {len(body)}")(writer)
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(pause)

    return answer


def cut(body: bytes, announced: int) -> Answer:
    """Breaks off before the announced end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", f"Content-Length: {announced}")(writer)
        writer.write(body)
        await writer.drain()
        writer.close()

    return answer


async def silent(writer: asyncio.StreamWriter) -> None:
    """Takes the request and says nothing."""
    await asyncio.Event().wait()
