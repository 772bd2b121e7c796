"""Clients that leave at any moment: nothing is half done, nothing stays open, the next request works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_vllm.gateway.responses.stream import Relayed, unchanged
from harness.responses_app import PATH, App, app, response_of

MOMENTS = 60


class Events(httpx.AsyncByteStream):
    """A streamed answer that knows whether it was closed."""

    def __init__(self, response: dict[str, Any]) -> None:
        self._response = response
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, kind in enumerate(("created", "in_progress", "completed")):
            event = {"type": f"response.{kind}", "sequence_number": number, "response": self._response}
            yield b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.is_closed = True


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path) as running:
        yield running


async def leave_after(turns: int, request: asyncio.Task[httpx.Response]) -> bool:
    """Cancel a request after some turns of the event loop; return whether it was cut."""
    for _ in range(turns):
        await asyncio.sleep(0)
    request.cancel()
    (outcome,) = await asyncio.gather(request, return_exceptions=True)
    return isinstance(outcome, BaseException)


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {}, {"background": True}, {"store": False, "stream": True}]
)
async def test_client_that_leaves_at_any_moment_leaves_nothing_half_done(
    gateway: App, fields: dict[str, Any]
) -> None:
    streams: list[Events] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if not body.get("stream"):
            return httpx.Response(200, json=response_of(body))
        streams.append(Events(response_of(body)))
        return httpx.Response(200, stream=streams[-1])

    gateway.frontend.answer = answer
    cut = 0
    for turns in range(MOMENTS):
        body = {"model": "m", "input": f"number {turns}", **fields}
        cut += await leave_after(turns, asyncio.create_task(gateway.send("POST", PATH, json=body)))
    assert cut > 0
    assert all(stream.is_closed for stream in streams)
    whole = await gateway.create("hello", **fields)
    assert whole.status_code == 200
    rows = gateway.database.run_now(
        lambda t: t.all(
            "SELECT r.id, s.items, (SELECT COUNT(*) FROM gateway_response_items i WHERE i.response = r.id)"
            " FROM gateway_responses r LEFT JOIN gateway_response_sizes s ON s.response = r.id"
            " WHERE r.status IN ('completed', 'queued')"
        )
    )
    assert [row for row in rows if row[1] != row[2]] == []


@pytest.mark.parametrize("version", ["2.3", "2.4"])
async def test_answer_of_the_frontend_is_closed_whenever_the_client_leaves(version: str) -> None:
    for messages in range(5):
        stream = Events({})
        relayed = Relayed(answer := httpx.Response(200, stream=stream), unchanged(answer))
        left = asyncio.Event()
        sent = 0

        async def send(_: Any, left: asyncio.Event = left, messages: int = messages) -> None:
            nonlocal sent
            sent += 1
            if sent > messages:
                left.set()
                raise OSError("the client has left")

        async def receive(left: asyncio.Event = left) -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"spec_version": version}, "method": "POST"}
        async with asyncio.timeout(60):
            await asyncio.gather(relayed(scope, receive, send), return_exceptions=True)
        assert stream.is_closed
