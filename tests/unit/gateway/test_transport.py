"""Connections to a frontend that behaves well, badly, or ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from dynamo_vllm.gateway.transport import UNREAD_BYTES, Transport

Listening = tuple["Server", httpx.AsyncClient]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers each request with what the test says, and counts connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.replies: list[bytes] = []
        self.requests: list[bytes] = []
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                self.requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
                reply = self.replies.pop(0)
                writer.write(reply.removesuffix(b"EOF"))
                await writer.drain()
                if reply.endswith(b"EOF"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended.set()
            writer.close()


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=Transport()) as client:
        yield server, client
    listening.close()


async def test_connection_is_used_again(listening: Listening) -> None:
    server, client = listening
    chunked = b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    server.replies = [OK, chunked, OK]
    answers = [await client.post("/x", content=b"hello", headers={"a": "b"}) for _ in range(3)]
    received = [(answer.status_code, answer.text) for answer in answers]
    assert received == [(200, "ok"), (201, "abc"), (200, "ok")]
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert server.requests[0].endswith(b"\r\n\r\nhello")


async def test_requests_at_the_same_time_have_connections_of_their_own(listening: Listening) -> None:
    server, client = listening
    server.replies = [OK] * 5
    await asyncio.gather(*(client.post("/x") for _ in range(5)))
    assert server.connections == 5


async def test_answer_that_was_not_read_ends_the_connection(listening: Listening) -> None:
    server, client = listening
    server.replies = [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nab"]
    async with client.stream("POST", "/x") as answer:
        assert answer.status_code == 200
    await server.ended.wait()


@pytest.mark.parametrize(
    "reply",
    [
        b"EOF",
        b"HTTP/1.1 200 OK\r\ncontEOF",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabEOF",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\nEOF",
        b"SSH-2.0 nonsense\r\n\r\n",
    ],
)
async def test_broken_answers_are_errors(listening: Listening, reply: bytes) -> None:
    server, client = listening
    server.replies = [reply, OK]
    with pytest.raises(httpx.TransportError):
        await client.post("/x")
    assert (await client.post("/x")).text == "ok"


async def test_answer_may_end_with_the_connection(listening: Listening) -> None:
    server, client = listening
    server.replies = [b"HTTP/1.1 200 OK\r\n\r\nabcEOF", b"HTTP/1.1 100 Continue\r\n\r\n" + OK]
    assert (await client.post("/x")).text == "abc"
    assert (await client.post("/x")).text == "ok"


async def test_long_answer_comes_whole_though_nobody_reads_for_a_while(listening: Listening) -> None:
    server, client = listening
    size = 20 * UNREAD_BYTES
    server.replies = [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size]
    read = 0
    async with client.stream("POST", "/x") as answer:
        async for chunk in answer.aiter_raw():
            assert len(chunk) <= 3 * UNREAD_BYTES
            read += len(chunk)
            await asyncio.sleep(0.0001)
    assert read == size


async def test_nobody_listens() -> None:
    async with httpx.AsyncClient(transport=Transport()) as client:
        with pytest.raises(httpx.ConnectError):
            await client.post("http://127.0.0.1:1/x")
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.post("https://127.0.0.1:1/x")


async def test_silence_ends_with_the_time_for_it(listening: Listening) -> None:
    server, client = listening
    server.replies = [b""]
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/x", timeout=httpx.Timeout(5, read=0.01))
    await server.ended.wait()
