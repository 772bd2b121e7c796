"""Uploads of one tenant: what they may keep, however many come at once and however they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect

from dynamo_vllm.gateway import kept
from dynamo_vllm.gateway.batches import files
from dynamo_vllm.gateway.batches.files import KIND
from dynamo_vllm.gateway.batches.routes import Batches
from dynamo_vllm.gateway.database import Database, Transaction
from harness.open_gate import OpenGate
from harness.waiting import until_async

HEAD = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
TAIL = b"\r\n--x--\r\n"
FORM = {"content-type": "multipart/form-data; boundary=x"}
TENANT_BYTES = 100_000


class Gateway:
    """Routes of files and batches, without running any."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.folder = folder
        self.database = database
        limits: dict[str, Any] = {"file_bytes": 50_000, "tenant_bytes": TENANT_BYTES}
        self.batches = Batches(database, httpx.AsyncClient(), folder, OpenGate(), beat_seconds=0.05, **limits)
        self.transport = httpx.ASGITransport(Starlette(routes=self.batches.routes()))

    def client(self, tenant: str = "a") -> httpx.AsyncClient:
        headers = {"x-gateway-tenant": tenant, "x-gateway-key": tenant}
        return httpx.AsyncClient(transport=self.transport, base_url="http://gateway", headers=headers)

    async def upload(self, size: int, tenant: str = "a", **headers: str) -> httpx.Response:
        return await self.send(HEAD + FILE + b"x" * size + TAIL, tenant, **headers)

    async def send(self, body: Any, tenant: str = "a", **headers: str) -> httpx.Response:
        async with self.client(tenant) as client:
            return await client.post("/v1/files", content=body, headers={**FORM, **headers})

    def kept(self, tenant: str = "a") -> int:
        return self.database.run_now(lambda t: kept.kept(t, tenant, KIND))

    def reserved(self) -> int:
        row = self.database.run_now(lambda t: t.one("SELECT COUNT(*) FROM gateway_uploads"))
        return 0 if row is None else int(row[0])

    async def until_reserved(self, count: int) -> None:
        """Wait until the database has them and, a moment later, those who wait for it know."""
        reserved = self.batches._files._reserved
        await until_async(f"{count} uploads", lambda: self.reserved() == len(reserved) == count)


@pytest.fixture
def gateway(database: Database, tmp_path: Path) -> Gateway:
    return Gateway(database, tmp_path)


def assert_refused(reply: httpx.Response, status: int, code: str) -> None:
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


class Slow:
    """A body whose last piece comes when it is told to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.go = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield HEAD + FILE
        await self.go.wait()
        yield b"x" * self.size + TAIL


@contextlib.asynccontextmanager
async def uploading(
    gateway: Gateway, size: int, count: int, declared: int | None = None
) -> AsyncIterator[Any]:
    """Uploads that have begun."""
    length = {} if declared is None else {"content-length": str(declared)}
    bodies = [Slow(size) for _ in range(count)]
    tasks = [asyncio.ensure_future(gateway.send(body, **length)) for body in bodies]
    await gateway.until_reserved(count)

    async def finish() -> list[httpx.Response]:
        for body in bodies:
            body.go.set()
        return await asyncio.gather(*tasks)

    try:
        yield finish
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_uploads_at_the_same_time_cannot_pass_the_tenants_bytes(gateway: Gateway) -> None:
    async with uploading(gateway, 40_000, 2, declared=40_300) as finish:
        assert_refused(await gateway.upload(40_000), 413, "storage_full")
        assert (await gateway.upload(40_000, "b")).status_code == 200
        assert [reply.status_code for reply in await finish()] == [200, 200]
    assert (gateway.kept(), gateway.reserved()) == (80_000, 0)
    assert (await gateway.upload(20_000)).status_code == 200
    assert (await gateway.upload(1)).status_code == 413


async def test_upload_without_a_length_takes_the_room_of_the_largest_file(gateway: Gateway) -> None:
    async with uploading(gateway, 10, 2) as finish:
        assert (await gateway.upload(10)).status_code == 413
        assert [reply.status_code for reply in await finish()] == [200, 200]
    assert (gateway.kept(), gateway.reserved()) == (20, 0)


async def disconnect(gateway: Gateway) -> None:
    class Gone:
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield HEAD + FILE + b"xx"
            raise ClientDisconnect

    assert (await gateway.send(Gone())).status_code == 499


async def cancel(gateway: Gateway) -> None:
    async with uploading(gateway, 10, 1):
        pass


async def send_too_much(gateway: Gateway) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield HEAD + FILE
        for _ in range(60):
            yield b"x" * 1000
        yield TAIL

    assert_refused(await gateway.send(body()), 413, "file_too_large")


async def name_another_purpose(gateway: Gateway) -> None:
    body = HEAD.replace(b"\r\nbatch\r\n", b"\r\nfine-tune\r\n") + FILE + b"x" + TAIL
    assert (await gateway.send(body)).status_code == 400


async def break_the_form(gateway: Gateway) -> None:
    assert (await gateway.send(b"nonsense")).status_code == 400


async def be_too_slow(gateway: Gateway) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "seconds_for", lambda size: 0.05)
        assert (await gateway.send(Slow(10))).status_code == 408


async def fill_the_disk(gateway: Gateway) -> None:
    def full(target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_flush", full)
        assert_refused(await gateway.upload(10), 507, "storage_full")


FAILURES = (
    *(disconnect, cancel, send_too_much, name_another_purpose),
    *(break_the_form, be_too_slow, fill_the_disk),
)


async def test_upload_that_fails_gives_its_room_back(gateway: Gateway) -> None:
    for fail in FAILURES:
        for _ in range(3):
            await fail(gateway)
        await gateway.until_reserved(0)
        assert gateway.kept() == 0, fail
        assert list((gateway.folder / "files").iterdir()) == [], fail
    async with uploading(gateway, 40_000, 2, declared=40_300) as finish:
        assert [reply.status_code for reply in await finish()] == [200, 200]


async def test_room_of_a_killed_gateway_comes_back_and_that_of_a_living_one_stays(gateway: Gateway) -> None:
    async with uploading(gateway, 40_000, 1, declared=40_300) as finish:
        *_, before = gateway.database.run_now(
            lambda t: (
                t.execute("UPDATE gateway_uploads SET expires = expires - 30"),
                t.execute("INSERT INTO gateway_uploads VALUES ('killed', 'a', 90000, 1.0)"),
                expiry(t),  # in the same transaction: the gateway's own beats go on
            )
        )
        await gateway.batches._files.beat()
        assert gateway.database.run_now(expiry) > before + 20
        assert (await gateway.upload(50_000)).status_code == 200
        await gateway.batches._files.sweep()
        assert gateway.reserved() == 1
        assert (await finish())[0].status_code == 200


def expiry(t: Transaction) -> float:
    row = t.one("SELECT MAX(expires) FROM gateway_uploads")
    assert row is not None
    return float(row[0])


async def test_upload_whose_room_was_lost_is_refused_if_others_took_it(gateway: Gateway) -> None:
    async with uploading(gateway, 40_000, 1, declared=40_300) as finish:
        gateway.database.run_now(lambda t: t.execute("DELETE FROM gateway_uploads"))
        for size in (45_000, 45_000):
            assert (await gateway.upload(size)).status_code == 200
        assert (await finish())[0].status_code == 413
    assert gateway.kept() == 90_000


async def test_a_tenant_has_some_uploads_at_a_time_and_leaves_places_to_others(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_UPLOADS", 4)
    async with uploading(gateway, 10, 2, declared=300) as finish:
        reply = await gateway.upload(10)
        assert_refused(reply, 429, "too_many_uploads")
        assert reply.headers["retry-after"]
        assert (await gateway.upload(10, "b")).status_code == 200
        await finish()
    assert (await gateway.upload(10)).status_code == 200


async def test_empty_files_count(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    replies = [await gateway.upload(0) for _ in range(4)]
    assert [reply.status_code for reply in replies[:3]] == [200] * 3
    assert_refused(replies[3], 400, "too_many_files")
    async with gateway.client() as client:
        assert (await client.delete(f"/v1/files/{replies[0].json()['id']}")).status_code == 200
    assert (await gateway.upload(0)).status_code == 200


async def test_odd_names_are_no_error_of_the_server(gateway: Gateway) -> None:
    body = HEAD + FILE.replace(b"in.jsonl", b"a\0b") + b"x" + TAIL
    assert (await gateway.send(body)).json()["filename"] == "ab"
    async with gateway.client() as client:
        for path in ("/v1/files?after=%00", "/v1/files/%00", "/v1/batches?after=%00", "/v1/batches/%00"):
            assert (await client.get(path)).status_code == 404, path
        assert (await client.get("/v1/files?purpose=%00")).json()["data"] == []
        new = {"input_file_id": "\0", "endpoint": "/v1/completions"}
        assert (await client.post("/v1/batches", json=new)).status_code == 404


async def test_no_batch_begins_when_nothing_more_may_be_kept(gateway: Gateway) -> None:
    file_id = (await gateway.upload(10)).json()["id"]
    gateway.database.run_now(lambda t: kept.add(t, "a", KIND, TENANT_BYTES))
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions"}
    async with gateway.client() as client:
        assert_refused(await client.post("/v1/batches", json=body), 413, "storage_full")
