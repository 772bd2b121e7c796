"""Which background responses wait, and which gateway may start them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.responses.queue import ROWS_PER_TENANT, ResponseQueue
from dynamo_vllm.gateway.responses.store import New, ResponseStore

T = TypeVar("T")
STALE_SECONDS = 20.0


class Tables:
    """A queue with a clock of its own."""

    def __init__(self, database: Database) -> None:
        self.now = 1000.0
        self.database = database
        self.queue = ResponseQueue(STALE_SECONDS, clock=lambda _: self.now)
        self.store = ResponseStore(30, 1 << 30, clock=lambda _: self.now)

    def run(self, work: Callable[[Transaction], T]) -> T:
        return self.database.run_now(work)

    def add(self, *names: str, tenant: str = "a", key_id: str | None = "k") -> None:
        headers = None if key_id is None else json.dumps({identity.KEY: key_id})
        for name in names:
            self.now += 1
            new = New(name, tenant, None, "queued", "{}", [], is_background=True, headers=headers)
            self.run(partial(self.store.keep, new=new))

    def waiting(self) -> list[str]:
        return [row.id for row in self.run(self.queue.waiting)]

    def lease(self, name: str, owner: str = "one") -> bool:
        return self.run(lambda t: self.queue.lease(t, name, owner)) is not None

    def begin(self, name: str, owner: str = "one") -> int | None:
        return self.run(lambda t: self.queue.begin(t, name, owner))

    def hold(self, name: str, seconds: float, owner: str = "one") -> None:
        self.run(lambda t: self.queue.hold(t, name, owner, seconds))

    def status(self, name: str) -> str:
        response = self.run(lambda t: self.store.get(t, name, "a"))
        assert response is not None
        return response.status


@pytest.fixture
def tables(database: Database) -> Tables:
    return Tables(database)


def test_many_of_one_tenant_hide_none_of_another(tables: Tables) -> None:
    tables.add(*(f"a{n}" for n in range(3 * ROWS_PER_TENANT)))
    tables.add("b1", "b2", tenant="b")
    assert tables.waiting()[:4] == ["a0", "b1", "a1", "b2"]
    assert len(tables.waiting()) == ROWS_PER_TENANT + 2


def test_response_runs_in_one_gateway_and_in_another_if_that_one_is_gone(tables: Tables) -> None:
    tables.add("r1")
    assert tables.lease("r1") and not tables.lease("r1", "two")
    assert tables.status("r1") == "queued"
    assert tables.begin("r1", "two") is None
    assert tables.begin("r1") == 1
    tables.now += 15
    assert tables.run(lambda t: tables.queue.beat(t, "r1", "one"))
    tables.now += 15
    assert tables.waiting() == []
    tables.now += 10
    assert tables.waiting() == ["r1"]
    assert tables.lease("r1", "two") and tables.begin("r1", "two") == 2
    assert not tables.run(lambda t: tables.queue.beat(t, "r1", "one"))


def test_gateway_that_ends_before_it_starts_a_response_leaves_it_to_others(tables: Tables) -> None:
    tables.add("r1")
    assert tables.lease("r1")
    assert tables.waiting() == []
    tables.now += STALE_SECONDS
    assert tables.waiting() == ["r1"]
    assert tables.lease("r1", "two") and tables.begin("r1") is None


def test_held_response_waits_for_its_time(tables: Tables) -> None:
    tables.add("r1", "r2")
    assert tables.lease("r1")
    tables.hold("r1", 5)
    assert tables.waiting() == ["r2"]
    assert not tables.lease("r1", "two")
    tables.now += 5
    assert tables.waiting() == ["r2", "r1"]


def test_clock_that_was_ahead_keeps_no_held_response_and_none_of_a_dead_gateway_waiting(
    tables: Tables,
) -> None:
    tables.add("r1")
    tables.now += 86400
    assert tables.lease("r1")
    tables.hold("r1", 10)
    tables.now -= 86400
    assert tables.waiting() == ["r1"]
    assert tables.lease("r1") and tables.begin("r1")
    tables.now -= 3600
    assert tables.waiting() == ["r1"] and tables.lease("r1", "two")
    assert tables.waiting() == []


def test_rows_of_a_held_key_make_room_for_others_of_their_tenant(tables: Tables) -> None:
    tables.add(*(f"r{n}" for n in range(ROWS_PER_TENANT)))
    tables.add("other", key_id="other")
    assert "other" not in tables.waiting()
    first = tables.waiting()
    tables.run(lambda t: tables.queue.hold_all(t, first, 5))
    assert tables.waiting() == ["other"]


def test_response_of_an_earlier_version_has_no_key(tables: Tables) -> None:
    tables.add("r1", key_id=None)
    (row,) = tables.run(tables.queue.waiting)
    assert (row.id, row.key_id) == ("r1", "")
