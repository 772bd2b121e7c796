"""A full or lost database: what clients get, and what becomes of answers that are computed."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.responses import background
from dynamo_vllm.gateway.responses.store import ResponseStore
from harness.responses_app import PATH, App, Text, app, response_of
from harness.waiting import until_async

LONG = "x" * 200_000


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path) as running:
        yield running


def fill(database: Database) -> None:
    """Let the database grow no more, as a full disk does."""
    database.run_now(lambda t: t.all("PRAGMA max_page_count = 1"))


def make_room(database: Database) -> None:
    database.run_now(lambda t: t.all("PRAGMA max_page_count = 1000000"))


async def say_much(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=response_of(json.loads(request.content), LONG))


async def stream_much(request: httpx.Request) -> httpx.Response:
    response = response_of(json.loads(request.content), LONG)
    event = {"type": "response.completed", "sequence_number": 3, "response": response}
    data = json.dumps(event, separators=(",", ":"))
    return httpx.Response(200, stream=Text(f"event: response.completed\ndata: {data}\n\n".encode()))


async def test_computed_answer_is_delivered_when_the_disk_is_full(
    gateway: App, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.frontend.answer = say_much
    fill(gateway.database)
    with caplog.at_level(logging.WARNING):
        answers = [await gateway.create("hello") for _ in range(3)]
    for answer in answers:
        response = answer.json()
        assert (answer.status_code, response["store"]) == (200, False)
        assert response["output"][0]["content"][0]["text"] == LONG
        assert "is full" in response["warning"]
        assert (await gateway.send("GET", f"{PATH}/{response['id']}")).status_code == 404
    assert len([line for line in caplog.messages if "full" in line]) <= 1
    make_room(gateway.database)
    stored = (await gateway.create("hello")).json()
    assert (stored["store"], "warning" in stored) == (True, False)


async def test_stream_ends_with_its_last_event_when_the_disk_is_full(gateway: App) -> None:
    gateway.frontend.answer = stream_much
    fill(gateway.database)
    text = (await gateway.create("hello", stream=True)).text
    last = json.loads(text.split("data: ")[-1])
    assert last["type"] == "response.completed"
    assert last["response"]["store"] is False
    assert "is full" in last["response"]["warning"]


async def test_request_that_needs_the_full_disk_first_is_refused_with_the_reason(gateway: App) -> None:
    fill(gateway.database)
    refused = await gateway.create(LONG, background=True)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (507, "storage_full")
    assert "disk or database is full" in error["message"]
    assert gateway.frontend.requests == []


async def test_background_answer_waits_for_room_on_the_disk(
    gateway: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "KEEP_WAIT_SECONDS", 0.01)
    answering = asyncio.Event()
    failures = 0

    async def hold(request: httpx.Request) -> httpx.Response:
        await answering.wait()
        return await say_much(request)

    finish = ResponseStore.finish

    def counted(self: ResponseStore, t: Transaction, *more: object) -> None:
        nonlocal failures
        try:
            finish(self, t, *more)  # type: ignore[arg-type]
        except sqlite3.OperationalError:
            failures += 1
            raise

    monkeypatch.setattr(ResponseStore, "finish", counted)
    gateway.frontend.answer = hold
    name = await gateway.queue("hello")
    await gateway.until(name, "in_progress")
    fill(gateway.database)
    answering.set()
    await until_async("two failures", lambda: failures >= 2)
    make_room(gateway.database)
    response = await gateway.until(name, "completed")
    assert response["output"][0]["content"][0]["text"] == LONG
    assert len(gateway.frontend.requests) == 1
