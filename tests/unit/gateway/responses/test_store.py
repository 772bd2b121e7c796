"""Chains of responses, their time, and the bytes of a tenant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from dynamo_vllm.gateway import kept, schema
from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.responses import store
from dynamo_vllm.gateway.responses.items import Item
from dynamo_vllm.gateway.responses.store import DAY_SECONDS, KIND, New, ResponseStore
from harness.refusals import refused

T = TypeVar("T")
REFERENCE = Item("r1_in", b'{"type":"item_reference","id":"r1_in"}', is_reference=True)


class Tables:
    """A store with a clock of its own."""

    def __init__(self, database: Database, tenant_bytes: int = 10_000) -> None:
        self.now = 0.0
        self.database = database
        self.store = ResponseStore(30, tenant_bytes, clock=lambda _: self.now)

    def run(self, work: Callable[[Transaction], T]) -> T:
        return self.database.run_now(work)

    def keep(self, name: str, previous: str | None = None, size: int = 1) -> None:
        inputs, outputs = [Item(f"{name}_in", b"i" * size)], [Item(f"{name}_out", f'"{name}"'.encode())]
        new = New(name, "a", previous, "completed", "{}", inputs, outputs)
        self.now += 1
        self.run(lambda t: self.store.keep(t, new))

    def is_kept(self, name: str, tenant: str = "a") -> bool:
        return self.run(lambda t: self.store.get(t, name, tenant)) is not None

    def history(self, name: str, tenant: str = "a") -> list[bytes]:
        return self.run(lambda t: self.store.history(t, name, tenant))

    def rows(self) -> int:
        return len(self.run(lambda t: t.all("SELECT 1 FROM gateway_response_items"))) // 2

    def count(self, table: str) -> int:
        (row,) = self.run(lambda t: t.all(f"SELECT COUNT(*) FROM gateway_response_{table}"))
        return int(row[0])

    def sweep(self) -> None:
        while self.run(self.store.sweep):
            pass


@pytest.fixture
def tables(database: Database) -> Tables:
    return Tables(database)


def test_history_is_the_whole_chain_in_order(tables: Tables) -> None:
    tables.keep("r1")
    tables.keep("r2", "r1")
    tables.keep("other", "r1")
    tables.keep("r3", "r2")
    assert tables.history("r3") == [b"i", b'"r1"', b"i", b'"r2"', b"i", b'"r3"']


def test_other_tenants_find_nothing(tables: Tables) -> None:
    tables.keep("r1")
    assert tables.is_kept("r1") and not tables.is_kept("r1", "b")
    with refused(400, code="previous_response_not_found"):
        tables.history("r1", "b")
    with refused(404):
        tables.run(lambda t: tables.store.delete(t, "r1", "b"))
    with refused(404):
        tables.run(lambda t: tables.store.resolved(t, [REFERENCE], None, "b"))


def test_deleted_beginning_is_named_when_a_follower_is_continued(tables: Tables) -> None:
    tables.keep("r1")
    tables.keep("r2", "r1")
    tables.run(lambda t: tables.store.delete(t, "r1", "a"))
    with refused(400, "'r1'"):
        tables.run(lambda t: tables.store.resolved(t, [], "r2", "a"))


def test_beginning_stays_as_long_as_a_follower(tables: Tables) -> None:
    tables.keep("r1")
    tables.now = 20 * DAY_SECONDS
    tables.keep("r2", "r1")
    tables.now = 35 * DAY_SECONDS
    tables.sweep()
    assert not tables.is_kept("r1")
    assert tables.history("r2") == [b"i", b'"r1"', b"i", b'"r2"']
    tables.now = 60 * DAY_SECONDS
    tables.sweep()
    assert tables.rows() == 0
    assert tables.run(lambda t: kept.kept(t, "a", KIND)) == 0


def test_oldest_responses_of_a_full_tenant_are_forgotten(database: Database) -> None:
    tables = Tables(database, tenant_bytes=100_000)
    for number in range(20):
        tables.keep(f"r{number}", size=15_000)
    assert [n for n in range(20) if tables.is_kept(f"r{n}")] == [14, 15, 16, 17, 18, 19]
    assert tables.run(lambda t: kept.kept(t, "a", KIND)) <= 100_000
    with refused(413, "store: false"):
        tables.store.refuse_too_large([Item("x", b"y" * 100_001)])


def test_named_original_stays_as_long_as_what_names_it(tables: Tables) -> None:
    tables.keep("r1")
    tables.now = 20 * DAY_SECONDS
    (item,) = tables.run(lambda t: tables.store.resolved(t, [REFERENCE], None, "a"))
    tables.run(lambda t: tables.store.keep(t, New("r2", "a", None, "completed", "{}", [item])))
    tables.now = 35 * DAY_SECONDS
    tables.sweep()
    with refused(404, "'r1_in' is not kept"):
        tables.run(lambda t: tables.store.resolved(t, [REFERENCE], None, "a"))
    assert tables.history("r2") == [b"i"]
    tables.now = 60 * DAY_SECONDS
    tables.sweep()
    assert tables.run(lambda t: kept.kept(t, "a", KIND)) == 0
    assert sum(map(tables.count, ("items", "sizes", "references", "item_names"))) == 0


def test_pages_of_input_items(tables: Tables) -> None:
    tables.keep("r1")
    tables.keep("r2", "r1")

    def page(order: str, after: str | None, limit: int) -> tuple[list[str], bool]:
        rows, more = tables.run(lambda t: tables.store.inputs(t, "r2", "a", order, after, limit))
        return [item for item, _ in rows], more

    assert page("asc", None, 2) == (["r1_in", "r1_out"], True)
    assert page("asc", "r1_out", 2) == (["r2_in"], False)
    assert page("desc", None, 5) == (["r2_in", "r1_out", "r1_in"], False)
    with refused(400):
        page("asc", "nobody", 2)


def test_items_with_names_that_no_index_takes_stay_without_when_an_old_database_is_opened(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/old.db"
    tables = Tables(Database(url, schema.ALL), 10**6)
    tables.keep("x" * 2690)
    tables.keep("r1")
    tables.run(lambda t: t.execute("DELETE FROM gateway_response_item_names"))
    tables.database.close()
    again = Database(url, schema.ALL)
    names = again.run_now(lambda t: t.all("SELECT id FROM gateway_response_item_names ORDER BY id"))
    assert names == [("r1_in",), ("r1_out",)]
    again.close()


def test_full_tenant_makes_room_some_at_a_time(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SWEPT_TOGETHER", 2)
    for number in range(9):
        tables.keep(f"r{number}")
    (row,) = tables.run(lambda t: t.all("SELECT SUM(bytes) FROM gateway_responses"))
    small = Tables(tables.database, int(row[0]) + 1)
    small.now = tables.now
    new = New("big", "a", None, "completed", "{}", given=[Item("in", b"i" * (int(row[0]) // 2))])
    with refused(413):
        small.run(lambda t: small.store.keep(t, new))
    assert small.rows() == 9
    rounds = 1
    while small.run(lambda t: small.store.make_room(t, new)):
        rounds += 1
    assert rounds > 2
    small.run(lambda t: small.store.keep(t, new))
    assert small.is_kept("big") and small.is_kept("r8") and not small.is_kept("r3")
    whole = New("whole", "a", None, "completed", "{}", given=[Item("in", b"i" * int(row[0]) * 2)])
    assert not small.run(lambda t: small.store.make_room(t, whole)) and small.is_kept("big")
