"""The routes of /v1/responses in one process, in front of a frontend that answers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from dynamo_vllm.gateway import schema
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.responses.routes import Responses

PATH = "/v1/responses"
LIMIT_SECONDS = 60
Answering = Callable[[httpx.Request], Awaitable[httpx.Response]]


def response_of(request: dict[str, Any], text: str = "hi", **more: Any) -> dict[str, Any]:
    """What the frontend answers."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "role": "assistant", "status": "completed", "content": content}
    number = next(_numbers)
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": request.get("model"),
        "output": [{"id": f"msg_{number}", **message}],
        "store": request.get("store"),
        "usage": {"input_tokens": 1, "output_tokens": 1},
        **more,
    }


_numbers = iter(range(10**9))


class Frontend:
    """Records what it is sent; `answer` may be replaced."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.answer: Answering = self.say_hi

    async def say_hi(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=response_of(json.loads(request.content)))

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return await self.answer(request)

    def input(self, number: int = -1) -> list[Any]:
        items: list[Any] = json.loads(self.requests[number].content)["input"]
        return items


class Text(httpx.AsyncByteStream):
    """A body that comes as a stream."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


class App:
    """The routes, with a client for each tenant."""

    def __init__(self, database: Database, frontend: Frontend, responses: Responses) -> None:
        self.database = database
        self.frontend = frontend
        self.responses = responses
        self._transport = httpx.ASGITransport(Starlette(routes=responses.routes()))
        self.client = httpx.AsyncClient(base_url="http://gateway", transport=self._transport)

    async def send(
        self, method: str, path: str, tenant: str = "a", headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        sent = {"x-gateway-tenant": tenant, "x-gateway-key": f"key-{tenant}", **(headers or {})}
        return await self.client.request(method, path, headers=sent, timeout=LIMIT_SECONDS, **more)

    async def create(
        self, given: Any = "hello", tenant: str = "a", headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": "m", "input": given, **fields}
        return await self.send("POST", PATH, tenant, headers, json=body)

    async def queue(self, given: Any = "hello", tenant: str = "a", **more: Any) -> str:
        """Return the id of a background response."""
        answer = await self.create(given, tenant, background=True, **more)
        assert answer.status_code == 200, answer.text
        response_id: str = answer.json()["id"]
        return response_id

    async def get(self, response_id: str, tenant: str = "a") -> dict[str, Any]:
        fields: dict[str, Any] = (await self.send("GET", f"{PATH}/{response_id}", tenant)).json()
        return fields

    async def until(self, response_id: str, *states: str, tenant: str = "a") -> dict[str, Any]:
        """Poll a response until it has one of these states."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while (fields := await self.get(response_id, tenant)).get("status") not in states:
                await asyncio.sleep(0.01)
        return fields


@contextlib.asynccontextmanager
async def app(folder: Path, *gate: Any, database_url: str = "", **settings: Any) -> AsyncIterator[App]:
    """The routes with a database in this folder; background responses run."""
    frontend = Frontend()
    database = Database(database_url or f"sqlite:///{folder / 'gateway.db'}", schema.ALL)
    try:
        async with httpx.AsyncClient(
            base_url="http://frontend", transport=httpx.MockTransport(frontend.handle)
        ) as client:
            responses = Responses(database, client, *gate, **{"beat_seconds": 0.05, **settings})
            responses.start()
            try:
                yield App(database, frontend, responses)
            finally:
                await responses.close()
    finally:
        database.close()
