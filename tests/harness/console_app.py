"""The console's application without a deployment: nothing runs, and what it asks for is written down."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from dynamo_vllm.console import app
from dynamo_vllm.console.actions import Actions
from dynamo_vllm.console.data.bench import Bench
from dynamo_vllm.console.data.history import History
from dynamo_vllm.console.data.logs import Logs
from dynamo_vllm.console.data.overview import Poller
from dynamo_vllm.console.live import Hub
from dynamo_vllm.console.settings import Settings

HOST = "127.0.0.1:8001"
POSTED = {"origin": f"http://{HOST}", "x-console": "1"}


class Nobody:
    """Frontends, workers and a directory of a deployment in which nothing runs."""

    found: list[int] = []

    async def ask(self, *_: Any) -> Any:
        return []

    async def ask_all(self, verb: str, seconds: float | None = None) -> dict[int, dict[str, Any]]:
        return {}

    async def models(self) -> list[dict[str, Any]]:
        return []

    async def every(self, names: Any = ()) -> list[Any]:
        return []


class Decisions:
    def requests(
        self, limit: int, before: str | None, worker: str | None, model: str | None
    ) -> dict[str, Any]:
        return {"requests": [[limit, before, worker, model]], "dropped": 0}

    def request(self, id: str) -> dict[str, Any] | None:
        return {"request": {"id": id}} if id == "known" else None

    async def caches(self) -> dict[str, Any]:
        return {"blocks": 7}


def streamed(status: int, body: bytes, kind: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, stream=httpx.ByteStream(body), headers={"content-type": kind, **headers})


class Upstream:
    """The deployment behind the console."""

    def __init__(self) -> None:
        self.seen: list[httpx.Request] = []
        self.answer = streamed(200, b"{}", "application/json")
        self.make: Callable[[], httpx.Response] = lambda: self.answer
        self.client = httpx.AsyncClient(
            base_url="http://deployment", transport=httpx.MockTransport(self._handle)
        )

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return self.make()


class Console:
    def __init__(self, folder: Path, *, decisions: Any = None, **more: Any) -> None:
        fields: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 8001,
            "url": "http://d",
            "frontends": ("http://d",),
        }
        self.settings = Settings(**{**fields, **more})
        self.hub, self.upstream, past = Hub(), Upstream(), History()
        nobody: Any = Nobody()
        self.poller = Poller(nobody, nobody, nobody, past, self.hub, "none")
        read_only = self.settings.read_only
        parts = app.Parts(
            settings=self.settings,
            hub=self.hub,
            poller=self.poller,
            history=past,
            logs=Logs(folder),
            bench=Bench("http://d", self.hub.publish, dict(os.environ), ("false",)),
            actions=Actions(nobody, None, None, process_of=str, read_only=read_only, on_done=lambda _: None),
            deployment=self.upstream.client,
            decisions=decisions,
        )
        self.app = app.make(parts)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}")

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers={**POSTED, **headers})
