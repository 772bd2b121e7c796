"""The keeper of a lease, and the small client below it, with a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_vllm.config.planes import EtcdAccess
from dynamo_vllm.serving.plane import etcd_lease
from dynamo_vllm.serving.plane.etcd import Etcd, EtcdError
from dynamo_vllm.serving.plane.etcd_lease import LOOK_SECONDS, Keeper
from harness.servers import Server, etcd
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from runtime.conftest import fake

LEASE = 0x5E95A1E124248908
ENTRIES = {b"v1/instances/a": b'{"a": 1}', b"v1/mdc/\xff": b""}
MANY = {f"v1/mdc/adapter-{number}".encode(): b"{}" for number in range(250)}
"""More than etcd takes in one transaction."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with etcd(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@contextlib.asynccontextmanager
async def registered(server: Server) -> AsyncIterator[tuple[Etcd, Keeper]]:
    """A process with entries, which its keeper has seen."""
    async with Etcd(EtcdAccess((server.url,))) as client:
        await client.grant(LEASE, 60)
        await client.put(ENTRIES, LEASE)
        keeper = Keeper(client, LEASE)
        await keeper.look()
        yield client, keeper
        await client.revoke(LEASE)


async def test_lost_lease_comes_back_with_its_number_time_and_entries(server: Server) -> None:
    async with registered(server) as (client, keeper):
        await client.revoke(LEASE)
        assert await client.values(ENTRIES) == {}
        await keeper.look()
        found = await client.lease(LEASE)
        assert found is not None
        assert (found.granted_seconds, found.keys) == (60, frozenset(ENTRIES))
        assert await client.values(ENTRIES) == ENTRIES


async def test_lease_that_is_given_back_is_gone(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    access = EtcdAccess((server.url,))
    async with Etcd(access) as client:
        await client.grant(LEASE, 60)
        await client.put(ENTRIES, LEASE)
        caplog.set_level("INFO", etcd_lease.__name__)
        await etcd_lease.give_back(access, LEASE)
        assert await client.lease(LEASE) is None
        assert await client.values(ENTRIES) == {}
        await etcd_lease.give_back(access, LEASE)
    assert caplog.messages == [], "the runtime may have been faster"
    await etcd_lease.give_back(EtcdAccess(("http://127.0.0.1:9",)), LEASE)
    assert "until its lease ends" in caplog.text


async def test_many_entries_come_back(server: Server) -> None:
    async with registered(server) as (client, keeper):
        await client.put(MANY, LEASE)
        await keeper.look()
        await client.revoke(LEASE)
        await keeper.look()
        assert await client.values([*MANY, *ENTRIES]) == MANY | ENTRIES


async def test_what_the_process_took_out_itself_stays_out(server: Server) -> None:
    async with registered(server) as (client, keeper):
        first, second = ENTRIES
        await client.delete(first)
        await keeper.look()
        await client.revoke(LEASE)
        await keeper.look()
        assert await client.values(ENTRIES) == {second: ENTRIES[second]}


async def test_entries_that_could_not_be_put_back_are_not_forgotten(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with registered(server) as (client, keeper):
        await client.revoke(LEASE)
        with monkeypatch.context() as broken, pytest.raises(EtcdError):
            broken.setattr(client, "put", refuse)
            await keeper.look()
        await keeper.look()
        assert await client.values(ENTRIES) == ENTRIES


async def refuse(*_: object) -> None:
    raise EtcdError("etcd went away between the lease and its entries")


async def test_etcd_with_users_is_told_who_asks(tmp_path: Path) -> None:
    with etcd(tmp_path) as server:
        asks: list[tuple[str, dict[str, Any]]] = [
            ("auth/user/add", {"name": "root", "password": "secret"}),
            ("auth/role/add", {"name": "root"}),
            ("auth/user/grant", {"user": "root", "role": "root"}),
            ("auth/enable", {}),
        ]
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as admin:
            for path, body in asks:
                (await admin.post(f"/v3/{path}", json=body)).raise_for_status()
        async with Etcd(EtcdAccess((server.url,), "root", "secret")) as client:
            await client.grant(LEASE, 60)
            await client.put(ENTRIES, LEASE)
            assert await client.values(ENTRIES) == ENTRIES
        async with Etcd(EtcdAccess((server.url,), "root", "wrong")) as client:
            with pytest.raises(EtcdError, match="authentication failed"):
                await client.put(ENTRIES, LEASE)


# --- a worker that leaves ---------------------------------------------------------------------------------

DRAIN_SECONDS = 3600
"""It stays until the test has seen enough."""
ENDLESS = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 1000, "ignore_eos": True, "stream": True}


@pytest.fixture
def worker(server: Server, model: Path, tmp_path: Path) -> Iterator[tuple[Stack, Worker]]:
    """In etcd, with an answer under way that takes longer than it may stay for."""
    with stack(tmp_path, DYN_DISCOVERY_BACKEND="etcd", ETCD_ENDPOINTS=server.url) as made:
        made.start_frontend()
        one = made.start_worker(*fake(model, token_ms=50), "--drain-seconds", str(DRAIN_SECONDS))
        made.wait_ready()
        with httpx.stream("POST", f"{made.url}/v1/completions", json=ENDLESS, timeout=60) as answer:
            lines = answer.iter_lines()  # gone, it would end the request
            assert next(lines)
            yield made, one


async def test_lease_of_a_worker_that_leaves_is_not_put_back(
    server: Server, worker: tuple[Stack, Worker]
) -> None:
    """Its entries would send requests to a process that is gone, until the lease runs out."""
    made, leaving = worker
    (instance,) = made.instances()
    lease = int(instance["instance_id"])
    async with Etcd(EtcdAccess((server.url,))) as client:
        assert await client.lease(lease) is not None
        leaving.signal(signal.SIGTERM)
        until("the drain", lambda: "draining 1 requests" in leaving.log.read_text())
        await client.revoke(lease)
        end = time.monotonic() + 2 * LOOK_SECONDS  # a keeper that went on would have looked by then
        while time.monotonic() < end:
            assert await client.lease(lease) is None, leaving.log.read_text()
            await asyncio.sleep(0.1)
        assert leaving.process.poll() is None
        leaving.signal(signal.SIGTERM)  # a second one: it leaves at once
        leaving.process.wait(60)
        assert await client.lease(lease) is None
    assert "etcd had lost this process" not in leaving.log.read_text()
