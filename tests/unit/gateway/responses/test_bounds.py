"""What one request can make the gateway read, send and keep."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_vllm.gateway.database import Transaction
from dynamo_vllm.gateway.responses import asked, history
from dynamo_vllm.gateway.responses.routes import READS_TOGETHER
from harness.refusals import refused
from harness.responses_app import PATH, App, app, response_of
from harness.waiting import until_async

LIMIT = 200_000


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path) as running:
        yield running


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text, **more}


def reference(name: str) -> dict[str, str]:
    return {"type": "item_reference", "id": name}


def kept_text(gateway: App) -> int:
    """The bytes of all items in the database."""
    (row,) = gateway.database.run_now(lambda t: t.all("SELECT SUM(LENGTH(body)) FROM gateway_response_items"))
    return int(row[0])


def error_of(answer: httpx.Response, status: int, code: str | None) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    return error


def empty(t: Transaction, table: str) -> None:
    t.execute(f"DELETE FROM {table}")


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    """The frontend takes little, so that a test needs little."""
    monkeypatch.setattr(history, "BODY_BYTES", LIMIT)
    return LIMIT


async def test_item_that_is_named_many_times_is_kept_once(gateway: App) -> None:
    await gateway.create([message("x" * 20_000, id="msg_large")])
    before = kept_text(gateway)
    second = await gateway.create([reference("msg_large")] * 100)
    assert second.status_code == 200
    assert gateway.frontend.input() == [message("x" * 20_000, id="msg_large")] * 100
    assert kept_text(gateway) - before < 20_000
    third = await gateway.create("more", previous_response_id=second.json()["id"])
    assert third.status_code == 200, third.text
    assert gateway.frontend.input()[:100] == [message("x" * 20_000, id="msg_large")] * 100
    page = (await gateway.send("GET", f"{PATH}/{second.json()['id']}/input_items?limit=2")).json()
    assert [item["id"] for item in page["data"]] == ["msg_large"] * 2
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "x" * 20_000}]


async def test_references_to_more_than_the_frontend_takes_are_refused_unread(
    gateway: App, small_limit: int
) -> None:
    await gateway.create([message("x" * 1000, id="msg_large")])
    before, requests = kept_text(gateway), len(gateway.frontend.requests)
    modes: tuple[dict[str, Any], ...] = ({}, {"store": False}, {"background": True})
    for fields in modes:
        answer = await gateway.create([reference("msg_large")] * 300, **fields)
        error = error_of(answer, 413, "request_too_large")
        assert error["param"] == "input" and str(small_limit) in error["message"] and "31" in error["message"]
        assert (kept_text(gateway), len(gateway.frontend.requests)) == (before, requests)


async def test_history_that_is_longer_than_the_frontend_takes_is_refused(
    gateway: App, small_limit: int
) -> None:
    first = (await gateway.create("x" * (small_limit // 2))).json()["id"]
    second = (await gateway.create("é" * (small_limit // 5), previous_response_id=first)).json()["id"]
    requests = len(gateway.frontend.requests)
    for is_background in (False, True):
        fields = {"previous_response_id": second, "background": is_background}
        error_of(await gateway.create("y" * (small_limit // 5), **fields), 413, "request_too_large")
    assert len(gateway.frontend.requests) == requests


async def test_more_than_1000_items_are_refused_unless_nothing_is_kept_and_named(gateway: App) -> None:
    assert (await gateway.create([message("x")] * 1000)).status_code == 200
    error = error_of(await gateway.create([message("x")] * 1001), 400, None)
    assert error["param"] == "input" and "1000" in error["message"]
    answer = await gateway.create([message("x")] * 1500, store=False, previous_response_id=None)
    assert answer.status_code == 200
    assert len(gateway.frontend.input()) == 1500


async def test_items_of_failed_and_waiting_responses_cannot_be_named(gateway: App) -> None:
    async def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"message": "too long"})

    gateway.frontend.answer = refuse
    failed = await gateway.queue([message("x", id="msg_failed")])
    await gateway.until(failed, "failed")
    held = asyncio.Event()

    async def hold(request: httpx.Request) -> httpx.Response:
        await held.wait()
        return httpx.Response(200, json=response_of(json.loads(request.content)))

    gateway.frontend.answer = hold
    waiting = await gateway.queue([message("x", id="msg_waiting")])
    for name in ("msg_failed", "msg_waiting"):
        answer = await gateway.create([reference(name)], store=False)
        assert name in error_of(answer, 404, "item_not_found")["message"]
    held.set()
    await gateway.until(waiting, "completed")
    assert (await gateway.create([reference("msg_waiting")], store=False)).status_code == 200
    assert gateway.frontend.input() == [message("x", id="msg_waiting")]


async def test_newest_item_of_an_id_is_named(gateway: App) -> None:
    for number in range(3):
        await gateway.create([message("older", id="msg_same"), message(f"text {number}", id="msg_same")])
    await gateway.create([message("of another tenant", id="msg_same")], tenant="b")
    await gateway.create([reference("msg_same")], store=False)
    assert gateway.frontend.input() == [message("text 2", id="msg_same")]


async def test_deleted_original_is_named_when_it_is_needed(gateway: App) -> None:
    original = (await gateway.create([message("x", id="msg_gone")])).json()["id"]
    follower = (await gateway.create([reference("msg_gone"), message("y")])).json()["id"]
    await gateway.send("DELETE", f"{PATH}/{original}")
    error_of(await gateway.create([reference("msg_gone")]), 404, "item_not_found")
    continued = await gateway.create("more", previous_response_id=follower)
    assert "'msg_gone' was deleted" in error_of(continued, 400, "previous_response_not_found")["message"]
    items = (await gateway.send("GET", f"{PATH}/{follower}/input_items?order=asc")).json()["data"]
    assert items[0] == reference("msg_gone")


async def test_background_response_fails_if_an_item_that_it_names_is_deleted(tmp_path: Path) -> None:
    async with app(tmp_path, background_concurrency=0) as stopped:
        original = (await stopped.create([message("x", id="msg_gone")])).json()["id"]
        waiting = await stopped.queue([reference("msg_gone")])
        await stopped.send("DELETE", f"{PATH}/{original}")
    async with app(tmp_path) as gateway:
        response = await gateway.until(waiting, "failed")
    assert "'msg_gone'" in response["error"]["message"]


async def test_response_above_what_a_tenant_may_keep_is_refused_before_it_runs(tmp_path: Path) -> None:
    async with app(tmp_path, tenant_bytes=20_000) as gateway:
        older = (await gateway.create("x")).json()["id"]
        for is_background in (False, True):
            answer = await gateway.create("x" * 30_000, background=is_background)
            assert "store: false" in error_of(answer, 413, "too_large_to_keep")["message"]
        assert len(gateway.frontend.requests) == 1
        assert (await gateway.get(older))["status"] == "completed"


async def test_answer_above_what_a_tenant_may_keep_is_delivered_with_a_warning(tmp_path: Path) -> None:
    async with app(tmp_path, tenant_bytes=20_000) as gateway:

        async def say_much(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, json=response_of(json.loads(request.content), "x" * 30_000))

        gateway.frontend.answer = say_much
        answer = (await gateway.create("hello")).json()
        assert (answer["status"], answer["store"]) == ("completed", False)
        assert "not kept" in answer["warning"]
        assert (await gateway.send("GET", f"{PATH}/{answer['id']}")).status_code == 404


async def test_waiting_responses_that_fill_the_room_of_a_tenant_refuse_further_ones(tmp_path: Path) -> None:
    async with app(tmp_path, tenant_bytes=20_000, background_concurrency=0) as gateway:
        await gateway.queue("x" * 8000)
        error_of(await gateway.create("x" * 15_000, background=True), 413, "too_large_to_keep")
        assert (await gateway.create("x" * 15_000, "b", background=True)).status_code == 200


async def test_large_input_is_listed_in_pages_of_bytes(gateway: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PAGE_BYTES", 10_000)
    answer = await gateway.create([message("x" * 6000, id=f"msg_{n}") for n in range(3)])
    names, after = [], ""
    while True:
        path = f"{PATH}/{answer.json()['id']}/input_items?order=asc{after}"
        page = (await gateway.send("GET", path)).json()
        names.append([item["id"] for item in page["data"]])
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert names == [["msg_0"], ["msg_1"], ["msg_2"]]


async def test_chain_that_is_too_long_is_refused_by_its_length(
    gateway: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_HISTORY_ITEMS", 3)
    first = (await gateway.create("one")).json()["id"]
    second = (await gateway.create("two", previous_response_id=first)).json()["id"]
    answer = await gateway.create("three", previous_response_id=second)
    assert "4 items" in error_of(answer, 413, "request_too_large")["message"]


async def test_items_that_were_kept_before_names_were_have_names_after_the_start(tmp_path: Path) -> None:
    async with app(tmp_path) as old:
        answer = await old.create([message("x", id="msg_old")])
        for table in ("item_names", "sizes", "references"):
            old.database.run_now(partial(empty, table=f"gateway_response_{table}"))
    async with app(tmp_path) as gateway:
        again = await gateway.create([reference("msg_old")], previous_response_id=answer.json()["id"])
        assert again.status_code == 200, again.text
        assert [item.get("content") for item in gateway.frontend.input()][::2] == ["x", "x"]


def test_fields_beside_the_input_have_a_limit() -> None:
    body = json.dumps({"input": "x", "instructions": "y" * (asked.FIELD_BYTES + 1)}).encode()
    with refused(413):
        asked.read(body)
    whole = json.dumps({"input": "x" * (asked.FIELD_BYTES + 1), "instructions": "y"}).encode()
    assert asked.read(whole).is_stored


@pytest.mark.parametrize("what", ["items", "answers", "background"])
async def test_long_conversations_of_one_tenant_keep_no_other_waiting(
    gateway: App, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first = (await gateway.create("hello")).json()["id"]
    of_other = (await gateway.create("hello", tenant="b")).json()["id"]
    reads = 0

    def slow(read: Any) -> Any:
        def slowly(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            time.sleep(0.02)  # in the database's thread
            return read(*args)

        return slowly

    monkeypatch.setattr(history, "page", slow(history.page))
    monkeypatch.setattr(history, "bodies", slow(history.bodies))
    if what == "items":
        many = [gateway.send("GET", f"{PATH}/{first}/input_items") for _ in range(40)]
    else:
        fields = {"previous_response_id": first, "background": what == "background"}
        many = [gateway.create("more", "a", None, **fields) for _ in range(40)]
    tasks = [asyncio.ensure_future(request) for request in many]
    await until_async("the first to be read", lambda: reads, every=0)
    assert (await gateway.get(of_other, "b"))["id"] == of_other
    assert (await gateway.send("GET", f"{PATH}/{of_other}/input_items", "b")).status_code == 200
    assert reads <= 3 * READS_TOGETHER
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
