"""The gateway's store in a real PostgreSQL: with two gateways, and a server that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from dynamo_vllm.gateway import schema
from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.limits import Admitted
from harness import gateway_store
from harness.gateway_store import DEFAULT, NOON, Store, record, used, with_limits
from harness.servers import Server, postgres

TABLES = [words[5] for words in map(str.split, schema.ALL) if words[:2] == ["CREATE", "TABLE"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("psycopg")
    with postgres(tmp_path_factory.mktemp("postgres")) as running:
        yield running


def empty(server: Server) -> None:
    """Drop the tables; the next to open the database creates them."""
    with opened(server) as database:
        database.run_now(lambda t: [t.execute(f"DROP TABLE {name}") for name in TABLES])


@contextlib.contextmanager
def opened(server: Server) -> Iterator[Database]:
    with contextlib.closing(gateway_store.opened(server.url)) as database:
        yield database


class TestStore(gateway_store.TwoGateways):
    """As tests/unit/gateway/store/test_store.py has it in SQLite."""

    @pytest.fixture
    def open_database(self, server: Server) -> Callable[[], Database]:
        empty(server)
        return lambda: gateway_store.opened(server.url)


async def test_work_goes_on_when_the_server_is_back(server: Server) -> None:
    empty(server)  # a test may have pruned what comes late
    key = with_limits(tokens_per_minute=1000)
    with opened(server) as database:
        store = Store(database)
        await store.database.run(keys.create("before"))
        admitted = [store.limiter.admit(f"again-{n}", key, DEFAULT, 10, now=NOON) for n in range(10)]
        counted = used(store.database).requests
        await asyncio.to_thread(server.kill)
        waiting = asyncio.gather(*admitted, store.ledger.settle([record("again-0")]))
        await asyncio.to_thread(server.start)
        assert all(isinstance(answer, Admitted) for answer in (await waiting)[:-1])
        assert used(store.database).requests == counted + 1
        assert await store.ring.refresh()


async def test_a_server_process_that_hangs_is_left(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped backend accepts everything and answers nothing; its kernel confirms each packet."""
    monkeypatch.setattr("dynamo_vllm.gateway.database.HANG_SECONDS", 0.5)
    with opened(server) as database, contextlib.ExitStack() as ends:
        row = await database.run(lambda t: t.one("SELECT pg_backend_pid()"))
        assert row is not None
        backend = psutil.Process(int(row[0]))
        backend.suspend()
        ends.callback(backend.resume)
        async with asyncio.timeout(120):
            assert await database.run(lambda t: t.one("SELECT 7")) == (7,)


async def test_a_statement_that_takes_too_long_fails_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_vllm.gateway.connections.STATEMENT_SECONDS", 0.3)
    with opened(server) as database:
        slow = database.run(lambda t: t.one("SELECT pg_sleep(60)"))
        others = [database.run(lambda t: t.one("SELECT 7")) for _ in range(3)]
        async with asyncio.timeout(120):
            first, *rest = await asyncio.gather(slow, *others, return_exceptions=True)
        assert "statement timeout" in str(first) and rest == [(7,)] * 3


async def test_another_gateway_that_stops_in_a_transaction_does_not_lock_out_the_rest(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_vllm.gateway.connections.HANG_SECONDS", 0.5)
    monkeypatch.setattr("dynamo_vllm.gateway.connections.STATEMENT_SECONDS", 0.3)
    holding, may_end = threading.Event(), threading.Event()

    def stop(_: Transaction) -> None:
        holding.set()
        may_end.wait(120)

    with opened(server) as stuck, opened(server) as other, contextlib.ExitStack() as ends:
        ends.callback(may_end.set)
        task = asyncio.ensure_future(stuck.run(stop, exclusive=True))
        await asyncio.to_thread(holding.wait, 60)
        async with asyncio.timeout(120):
            assert await other.run(lambda t: t.one("SELECT 7"), exclusive=True) == (7,)
        may_end.set()
        await asyncio.gather(task, return_exceptions=True)
