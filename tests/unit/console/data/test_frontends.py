"""Frontends, asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from dynamo_vllm.console.data.frontends import Frontends

PAGES = {
    "/health": (200, json.dumps({"status": "ready", "models": ["tiny"]})),
    "/metrics": (200, 'dynamo_frontend_inflight_requests{model="tiny"} 2\n'),
    "/v1/models": (200, json.dumps({"data": [{"id": "tiny"}, "odd", {"no": "id"}]})),
}


class Server:
    """A frontend with these pages."""

    def __init__(self) -> None:
        self.pages = dict(PAGES)
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                status, text = self.pages.get(head.split()[1].decode(), (404, ""))
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield server
    listening.close()


@contextlib.asynccontextmanager
async def asking(*urls: str) -> AsyncIterator[Frontends]:
    frontends = Frontends(list(urls), urls[-1])
    yield frontends
    await frontends.close()


async def test_frontend_says_what_can_answer_and_how_busy_it_is(server: Server) -> None:
    async with asking(server.url) as frontends:
        (one,) = await frontends.ask()
        state = (one.name, one.models, one.is_ready, one.figures.in_flight)
        assert state == ("frontend", ("tiny",), True, 2.0)
        assert await frontends.models() == [{"id": "tiny"}]


async def test_frontend_that_is_gone_is_one_problem_of_several(server: Server) -> None:
    async with asking("http://127.0.0.1:1", server.url) as frontends:
        first, second = await frontends.ask()
        assert (first.name, second.name) == ("frontend", "frontend-2")
        assert first.problem and not first.is_ready
        assert second.problem is None
        assert await frontends.models() == [{"id": "tiny"}]


async def test_health_of_other_frontends_is_understood(server: Server) -> None:
    async with asking(server.url) as frontends:
        for health, is_ready in (
            ((503, json.dumps({"status": "not ready", "models": []})), False),
            ((200, "OK"), True),
            ((200, json.dumps({"status": "healthy"})), True),
            ((503, "<html>"), False),
        ):
            server.pages["/health"] = health
            (one,) = await frontends.ask()
            assert one.is_ready is is_ready and one.problem is None, health


async def test_pages_that_are_missing_or_odd_have_nothing(server: Server) -> None:
    server.pages = {"/health": PAGES["/health"], "/v1/models": (200, "[")}
    async with asking(server.url) as frontends:
        (one,) = await frontends.ask()
        assert one.figures.in_flight == 0.0
        assert await frontends.models() == []
