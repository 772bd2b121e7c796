"""The health check of the control app asks the database's thread and each loop."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from dynamo_vllm.config.options.gateway.serving import GatewayOptions
from dynamo_vllm.gateway.control import server
from dynamo_vllm.gateway.control.app import ControlApp
from dynamo_vllm.gateway.control.server import Control
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.heartbeats import SILENT_SECONDS


async def live(control: Control) -> tuple[int, str]:
    app = ControlApp(None, [], control.figures.text, control.stopped)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://control:1") as client:
        reply = await client.get("/live")
    return reply.status_code, reply.text


async def test_a_thread_that_hangs_or_a_loop_that_ends_is_named(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control(GatewayOptions(api_key=("sk-0123456789abcdef",)), database, tmp_path, tmp_path)
    assert await live(control) == (200, "")
    began, may_end = threading.Event(), threading.Event()
    work = database._submit(lambda t: began.set() or may_end.wait(60), False)  # type: ignore[func-returns-value]
    assert began.wait(60)
    monkeypatch.setattr(server, "THREAD_SECONDS", -1.0)
    status, text = await live(control)
    may_end.set()
    work.result()
    assert (status, text) == (503, "not running any more: the database's thread\n")
    monkeypatch.setattr(server, "THREAD_SECONDS", SILENT_SECONDS)
    now = [0.0]
    control.heartbeats._clock = lambda: now[0]
    control.heartbeats.beat("keys")
    now[0] = SILENT_SECONDS + 1
    assert await live(control) == (503, "not running any more: keys\n")
    control.heartbeats.beat("keys")
    assert await live(control) == (200, "")
