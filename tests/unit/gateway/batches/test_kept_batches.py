"""What a tenant may keep in batches, and what is forgotten."""

from __future__ import annotations

import os
import time
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from dynamo_vllm.gateway.batches import store
from dynamo_vllm.gateway.batches.files import DAY_SECONDS
from dynamo_vllm.gateway.batches.routes import Batches
from dynamo_vllm.gateway.batches.store import Batch
from harness.batch_bench import CHAT, Bench
from harness.open_gate import OpenGate
from harness.refusals import refused


async def created(bench: Bench, metadata: Any) -> httpx.Response:
    batches = Batches(bench.database, httpx.AsyncClient(), bench.folder, OpenGate())
    transport = httpx.ASGITransport(Starlette(routes=batches.routes()))
    file_id = bench.begin(1).file_id
    new = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", "metadata": metadata}
    headers = {"x-gateway-tenant": "a", "x-gateway-key": "a"}
    async with httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as client:
        return await client.post("/v1/batches", json=new)


async def test_metadata_beyond_openais_limits_is_refused_by_name(bench: Bench) -> None:
    beyond = {"16": {f"k{n}": "v" for n in range(17)}, "64": {"k" * 65: "v"}, "512": {"k": "v" * 513}}
    for limit, metadata in beyond.items():
        reply = await created(bench, metadata)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], limit in error["message"]) == (400, "metadata", True)
    others: tuple[Any, ...] = ({"k": 5}, {"k": None}, {"k": {}}, [], "x")
    for other in others:
        reply = await created(bench, other)
        assert reply.status_code == 400 and "metadata" in reply.json()["error"]["message"]
    for within in (None, {}, {"k" * 64: "ü" * 512}, {f"k{n}": "\0" for n in range(16)}):
        assert (await created(bench, within)).json()["metadata"] == within


def ended(bench: Bench, batch: Batch) -> None:
    claimed = bench.claim(batch, "one")
    assert bench.run(lambda t: bench.store.end(t, claimed, "one", "completed"))


def ids(bench: Bench, tenant: str = "a") -> set[str]:
    rows = bench.run(lambda t: t.all("SELECT id FROM gateway_batches WHERE tenant = ?", tenant))
    return {batch_id for (batch_id,) in rows}


def test_the_oldest_ended_batch_makes_room_for_a_new_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_BATCHES", 3)
    other = bench.begin(1, "b")
    batches = [bench.begin(1) for _ in range(3)]
    for batch in batches[1:]:
        ended(bench, batch)
    newest = bench.begin(1)
    assert ids(bench) == {batches[0].id, batches[2].id, newest.id}
    bench.begin(1)
    with refused(400, "cancel", code="too_many_batches"):
        bench.begin(1)
    assert ids(bench, "b") == {other.id}


def test_ended_batches_are_forgotten_after_some_days(bench: Bench) -> None:
    old, running = bench.begin(1), bench.begin(1)
    ended(bench, old)
    bench.now += 5 * DAY_SECONDS
    young = bench.begin(1)
    ended(bench, young)
    assert bench.run(lambda t: bench.store.forget(t, 4 * DAY_SECONDS)) == [old.id]
    assert ids(bench) == {running.id, young.id}


async def test_parts_of_batches_that_are_gone_are_removed(bench: Bench) -> None:
    active = bench.begin(1)
    parts = bench.folder / "parts"
    for name, age in (("batch_gone", 90_000), ("batch_young", 0), (active.id, 90_000)):
        (parts / name).mkdir(parents=True)
        (parts / name / "owner").write_bytes(b"x")
        for path in (parts / name / "owner", parts / name):
            os.utime(path, (time.time() - age,) * 2)
    batches = Batches(bench.database, httpx.AsyncClient(), bench.folder, OpenGate())
    await batches.sweep()
    assert {path.name for path in parts.iterdir()} == {"batch_young", active.id}


@pytest.mark.parametrize("status", ["in_progress", "cancelling"])
def test_clock_that_was_ahead_keeps_no_batch_of_a_dead_gateway_waiting(bench: Bench, status: str) -> None:
    bench.now = 3600.0
    batch = bench.begin(1)
    bench.claim(batch, "gone")
    bench.run(lambda t: t.execute("UPDATE gateway_batches SET status = ?", status))
    assert bench.run(lambda t: bench.store.waiting(t, 4)) == []
    bench.now = 0.0
    assert [waiting.id for waiting in bench.run(lambda t: bench.store.waiting(t, 4))] == [batch.id]
    assert bench.claim(batch, "next").owner == "next"
    assert bench.run(lambda t: bench.store.waiting(t, 4)) == []


def test_gateways_with_one_database_compare_beats_by_its_clock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = store.BatchStore(20)
    batch = bench.begin(1)
    assert bench.run(lambda t: shared.claim(t, batch.id, "one")) is not None
    ahead = time.time() + 60
    monkeypatch.setattr(bench.database._connection.transaction, "now", time.time)
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert bench.run(lambda t: shared.claim(t, batch.id, "two")) is None
