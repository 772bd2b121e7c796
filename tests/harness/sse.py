"""A small HTTP server on this machine that answers with the bytes it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
Script = Callable[["Request"], "Iterable[bytes | None]"]
"""What to write for a request, piece by piece; None closes the connection."""


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: Any


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = "a", finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def usage(prompt: int, output: int, cached: int | None = 0) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    return event(
        choices=[],
        usage={"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details},
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*events: bytes) -> bytes:
    """A whole answer, one chunk per event."""
    return HEAD + b"".join(map(chunk, events)) + LAST_CHUNK


def plain(status: int, body: bytes, *more: bytes) -> bytes:
    """An answer with a Content-Length."""
    head = b"HTTP/1.1 %d Word\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
        status,
        len(body),
    )
    return head + b"".join(line + b"\r\n" for line in more) + b"\r\n" + body


def answer(request: Request, name: str = "tiny", context: int = 4096) -> Iterator[bytes]:
    """As an OpenAI server would: as many tokens as asked for, and a list of one model."""
    if request.path == "/v1/models":
        yield plain(200, json.dumps({"data": [{"id": name, "max_model_len": context}]}).encode())
        return
    if request.body["model"] != name:
        yield plain(404, b'{"error": {"message": "there is no such model"}}')
        return
    count = request.body["max_tokens"]
    prompt = request.body.get("prompt") or json.dumps(request.body["messages"])
    yield HEAD
    for number in range(count):
        yield chunk(token(f"{number} ", "length" if number == count - 1 else None))
    yield chunk(usage(len(prompt), count)) + chunk(DONE) + LAST_CHUNK


@dataclass
class Server:
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[Request]:
        """The requests for an answer."""
        return [request for request in self.requests if request.body is not None]


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Server]:
    """A server in this loop."""
    found = Server()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while (request := await _read(reader)) is not None:
                found.requests.append(request)
                for piece in script(request):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # drain alone lets nobody else have a turn
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def served(script: Script) -> Iterator[Server]:
    """The same in a thread, for commands."""
    ready: list[Server] = []
    started, loop = threading.Event(), asyncio.new_event_loop()
    ending = asyncio.Event()

    async def live() -> None:
        async with scripted(script) as server:
            ready.append(server)
            started.set()
            await ending.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(live()))
    thread.start()
    try:
        assert started.wait(30)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode().strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(first.split()[1], headers, json.loads(body) if body else None)
