"""The list of requests and what is said of one, from records and bookings."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dynamo_vllm.config.options import FindOptions
from dynamo_vllm.console.decisions import messages
from dynamo_vllm.console.decisions import service as module
from dynamo_vllm.console.decisions.allowance import Allowance
from dynamo_vllm.console.decisions.block_map import BlockMap
from dynamo_vllm.console.decisions.messages import ActiveEvent, Booking, Place, Stored
from dynamo_vllm.console.decisions.mirror import Mirror
from dynamo_vllm.console.decisions.otlp import Unread
from dynamo_vllm.console.decisions.requests import MOST, Requests
from dynamo_vllm.console.decisions.service import Decisions
from dynamo_vllm.console.decisions.shapes import DEVICE, Worker
from dynamo_vllm.serving.watch.discovery import Member, Seen
from dynamo_vllm.serving.watch.request_trace import Sender

A, B, P = 0xA << 60, 0xB << 60, 0xC << 60
FRONTEND = Sender("f", (("credit", "1.5"), ("router", "kv"), ("is_synced", "0")))
BLOCKS = [1, 102, 10203]


class NoFeed:
    def follow(self, addresses: object, publishers: object) -> None:
        """Connect to nothing."""


class Found(Unread, frozen=True):
    """A record that is nothing but its JSON."""

    def payload(self) -> bytes:
        return self.export


class World:
    """Two workers, and a prefill worker, whose caches are all known."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.decisions = Decisions(
            FindOptions(),
            {},
            None,
            on_rows=lambda made: rows.extend(row for make in made if (row := make()) is not None),
        )

        async def nothing(sizes: object) -> list[bytes]:
            return []

        def chain(before: int, block: int) -> int:
            return before * 100 + block

        self.mirror = Mirror(None, chain, nothing, self.decisions._book, self.decisions._free)  # type: ignore[arg-type]
        self.decisions._mirror = self.mirror
        self.see(A, B, P)
        for instance in (A, B, P):
            self.mirror.blocks.begin(Worker(instance), 0.0)
        self.mirror._loads_since = 0.0

    @property
    def blocks(self) -> BlockMap:
        return self.mirror.blocks

    def see(self, *instances: int, is_first: bool = True) -> None:
        members = {
            one: Member(one, "prefill" if one == P else "backend", ("m",), (), 32) for one in instances
        }
        self.mirror.see(Seen(members=members), NoFeed(), is_first)  # type: ignore[arg-type]

    def end(
        self, name: str, worker: int = A, prefill: int | None = None, sender: Sender = FRONTEND, **more: Any
    ) -> None:
        found = {
            **{"request_id": name, "input_tokens": 100, "output_tokens": 5, "cached_tokens": 0},
            **{"request_received_ms": 1_000_000, "prefill_wait_time_ms": 1.0, "ttft_ms": 20.0},
            **{"total_time_ms": 100.0, "kv_hit_rate": 0.0},
            "worker": {"prefill_worker_id": prefill or worker, "decode_worker_id": worker},
            "replay": {"trace_block_size": 32, "input_sequence_hashes": [*BLOCKS, 9]},
            **more,
        }
        data = msgspec.json.encode({"request": found})
        self.decisions.take(sender, [Found(data, 0, len(data))])

    def book(self, name: str, worker: int, at: float, is_prefill: bool = False, tokens: int = 100) -> None:
        add = messages.AddRequest(None if is_prefill else BLOCKS, True, messages.Hint(tokens))
        event = ActiveEvent(name, Place(worker), Booking(add))
        self.mirror._take_active(event, at)

    def free(self, name: str, worker: int, at: float) -> None:
        self.mirror._take_active(ActiveEvent(name, Place(worker), "Free"), at)

    def keep_only(self, **limits: int) -> Decisions:
        """Keep so many requests, blocks or bytes."""
        made = self.decisions
        made._requests = Requests(module.short_name, made._read, made._explain, **limits)
        return made

    def listed(self, **query: Any) -> list[str]:
        return [row["id"] for row in self.decisions.requests(**query)["requests"]]

    def store(self, worker: int, at: float | None, *blocks: int) -> None:
        found = Stored([messages.Block(number, number) for number in blocks])
        self.blocks.store(Worker(worker), DEVICE, found, at)

    def decision(self, name: str) -> dict[str, Any]:
        """The only one."""
        (decision,) = self.details(name)["decisions"]
        return dict(decision)

    def details(self, name: str) -> dict[str, Any]:
        found = self.decisions.request(name)
        assert found is not None
        return found


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def world(rows: list[dict[str, Any]]) -> World:
    return World(rows)


def test_request_becomes_a_row(world: World, rows: list[dict[str, Any]]) -> None:
    world.end("x")
    assert rows == world.decisions.requests()["requests"]
    assert rows[0] == {
        **{"id": "x", "at": 1000.0, "model": "m", "adapter": None, "tenant": None, "input_tokens": 100},
        **{"output_tokens": 5, "cached_tokens": 0, "ttft_ms": 20.0, "total_ms": 100.0},
        **{"worker": "a00000", "prefill_worker": None, "outcome": "ok", "why": True},
    }


def test_newest_come_first_and_pages_follow(world: World) -> None:
    for number in range(5):
        world.end(str(number), worker=(A, B)[number % 2])
    assert world.listed(limit=2) == ["4", "3"]
    assert world.listed(limit=2, before="3") == ["2", "1"]
    assert world.listed(worker="b00000") == ["3", "1"]
    assert (world.listed(model="m", limit=1), world.listed(model="other")) == (["4"], [])


class Noted(Found, frozen=True):
    """A record that notes when it is read."""

    name: str
    read: list[str]

    def payload(self) -> bytes:
        self.read.append(self.name)
        return self.export


def unread(name: str, read: list[str], blocks: int = 0) -> Unread:
    found = {
        "request_id": name,
        "request_received_ms": 1,
        "input_tokens": 32 * blocks,
        "worker": {"decode_worker_id": A},
        "replay": {"trace_block_size": 32, "input_sequence_hashes": list(range(1, blocks + 1))},
    }
    return Noted(msgspec.json.encode({"request": found}), 0, 100, name, read)


@pytest.fixture
def busy(world: World) -> World:
    """So many requests end that none is explained at once, and nobody looks."""
    world.decisions._explaining.spend(1e9)
    world.decisions._on_rows = lambda made: None
    return world


def test_many_records_are_kept_unread_and_bounded(busy: World) -> None:
    read: list[str] = []
    for start in range(0, 10_000, 500):
        busy.decisions.take(FRONTEND, [unread(str(n), read) for n in range(start, start + 500)])
    requests = busy.decisions._requests
    assert (len(read), requests.count, requests.dropped) == (0, 2 * MOST, 10_000 - MOST)
    assert busy.listed(limit=3) == read == ["9999", "9998", "9997"]
    assert busy.decisions.request("9000") is not None
    assert busy.decisions.request("1000") is None


def test_blocks_of_kept_requests_are_bounded(busy: World) -> None:
    made = busy.keep_only(most=10, most_blocks=50)
    made.take(FRONTEND, [unread(str(n), [], blocks=20) for n in range(6)])
    assert busy.listed() == ["5", "4"]
    assert made._requests.count == 2


def test_bytes_of_unread_records_are_bounded(busy: World) -> None:
    made = busy.keep_only(most=10, most_bytes=350)
    made.take(FRONTEND, [unread(str(n), []) for n in range(6)])
    assert busy.listed() == ["5", "4", "3"]
    made.take(FRONTEND, [unread(str(n), []) for n in range(6, 9)])
    assert made._requests.count == 6


def test_request_that_is_explained_later_is_explained_as_at_once(world: World) -> None:
    world.store(A, 900.0, 1)
    world.end("now", kv_hit_rate=0.25)
    world.decisions._explaining.spend(1e9)
    world.end("later", kv_hit_rate=0.25)
    world.blocks.clear(Worker(A), 1001.0)
    now, later = (world.details(name)["decisions"][0] for name in ("now", "later"))
    assert later["candidates"] == now["candidates"]
    assert {one["overlap"]["device"] for one in later["candidates"]} == {1, 0}


def test_one_of_many_requests_counts_for_those_that_were_not_read(busy: World) -> None:
    busy.store(A, 900.0, 1)
    for _ in range(9):
        busy.end("unread")
    busy.decisions._explaining = Allowance(1.0, 1.0)
    busy.end("read")
    assert busy.blocks.tables()[2][1].times == 10


def test_candidates_have_what_they_had_then(world: World) -> None:
    """The chosen worker's own blocks come after the choice, and do not count for it."""
    world.store(B, 999.0, 1, 2)
    world.store(A, 1000.015, 1, 2, 3)
    world.end("x")
    world.decisions.note_idle(2000.0)
    (decision,) = world.details("x")["decisions"]
    shown = {one["worker"]: one for one in decision["candidates"]}
    assert shown["a00000"]["overlap"] == {"device": 0, "host": 0, "disk": 0}
    assert shown["b00000"]["overlap"] == {"device": 2, "host": 0, "disk": 0}
    assert (shown["a00000"]["cost"], shown["b00000"]["cost"]) == (53.0, 5.0)
    assert shown["a00000"]["is_chosen"]
    assert not decision["exact"], "another is cheaper"


def test_choice_is_exact_if_all_is_known(world: World) -> None:
    world.end("x")
    assert not world.details("x")["decisions"][0]["exact"], "others may have been active and still be"
    world.decisions.note_idle(2000.0)
    (decision,) = world.details("x")["decisions"]
    assert (decision["exact"], decision["notes"]) == (True, [])


def test_state_is_taken_that_fits_what_the_router_said(world: World) -> None:
    """A request in the router's queue was compared before it."""
    world.store(A, 999.0, 1, 2)
    world.blocks.remove(Worker(A), DEVICE, [2], 1000.3)
    world.end("x", prefill_wait_time_ms=500.0, ttft_ms=600.0, total_time_ms=700.0, kv_hit_rate=0.5)
    assert world.decision("x")["candidates"][0]["overlap"]["device"] == 2


def test_router_that_counts_other_blocks_is_noted(world: World) -> None:
    for number in range(module.DISAGREEMENTS):
        world.end(str(number), kv_hit_rate=0.5)
    assert "The router counted other cached blocks than these." in world.decision("0")["notes"]
    assert world.mirror.snapshots.wanted == {Worker(A)}, "its cache is read again"


def test_loads_are_those_of_ended_requests(world: World) -> None:
    world.end("long", request_received_ms=999_000, total_time_ms=5000.0, ttft_ms=3000.0)
    world.end("x", worker=B)
    loaded = world.decision("x")["candidates"][0]
    assert (loaded["active_requests"], loaded["active_prefill_tokens"]) == (1, 100)


def test_bookings_give_exact_loads(world: World) -> None:
    world.book("other", A, 999.0)
    world.book("x", B, 1000.001)
    world.end("x", worker=B)
    (decision,) = world.details("x")["decisions"]
    assert decision["exact"]
    assert [one["active_requests"] for one in decision["candidates"]] == [1, 0]


def test_request_without_a_record_is_listed_by_its_bookings(world: World, rows: list[dict[str, Any]]) -> None:
    """The frontend of an operator who has an own receiver of logs sends none."""
    world.book("moved", A, 1000.0)
    world.free("moved", A, 1001.0)
    world.book("moved", B, 1001.1)
    world.book("x", A, 1000.0)
    world.free("x", A, 1002.0)
    world.decisions.end_unrecorded(1001.5)
    assert rows == []
    world.decisions.end_unrecorded(1003.0)
    (row,) = rows
    assert (row["id"], row["worker"], row["total_ms"], row["input_tokens"]) == ("x", "a00000", 2000.0, 100)
    assert len(world.details("x")["decisions"]) == 1


def test_migration_is_seen_by_its_bookings(world: World) -> None:
    """The record still names the first worker."""
    world.book("x", A, 1000.001)
    world.free("x", A, 1000.05)
    world.book("x", B, 1000.06, tokens=110)
    world.end("x", worker=A)
    told = world.details("x")
    assert told["request"]["worker"] == "b00000"
    assert [one["attempt"] for one in told["decisions"]] == [1, 2]
    moved = [part for part in told["timeline"] if part["what"] == "migrated"]
    assert moved == [{"what": "migrated", "from_ms": 60.0, "to_ms": 60.0, "worker": "b00000"}]


def test_without_bookings_only_the_loss_of_the_worker_is_known(world: World) -> None:
    world.see(B, P, is_first=False)
    left = world.mirror._gone[0].until
    world.end("x", request_received_ms=(left - 1) * 1000, total_time_ms=5000.0)
    told = world.details("x")
    assert [part["worker"] for part in told["timeline"] if part["what"] == "migrated"] == [None]


def test_prefill_and_decode_are_two_decisions(world: World) -> None:
    world.end("x", worker=A, prefill=P, kv_transfer_estimated_latency_ms=8.0)
    told = world.details("x")
    shape = [(one["phase"], [c["worker"] for c in one["candidates"]]) for one in told["decisions"]]
    assert shape == [("prefill", ["c00000"]), ("decode", ["a00000", "b00000"])]
    assert [(part["what"], part["from_ms"], part["to_ms"]) for part in told["timeline"]] == [
        ("received", 0.0, 0.0),
        ("queued", 0.0, 1.0),
        ("routed", 1.0, 1.0),
        ("prefill", 1.0, 20.0),
        ("transfer", 20.0, 28.0),
        ("decode", 28.0, 100.0),
        ("ended", 100.0, 100.0),
    ]
    assert (told["request"]["worker"], told["request"]["prefill_worker"]) == ("a00000", "c00000")


def test_bookings_of_both_phases_may_come_in_any_order(world: World) -> None:
    world.book("x", A, 1000.02)
    world.book("x", P, 1000.001, is_prefill=True)
    world.end("x", worker=A, prefill=P)
    assert [one["phase"] for one in world.details("x")["decisions"]] == ["prefill", "decode"]


@pytest.mark.parametrize("is_synced", [False, True])
def test_request_whose_booking_nobody_heard_is_not_exact(world: World, is_synced: bool) -> None:
    sender = Sender("f", (("credit", "1.5"), ("router", "kv"), ("is_synced", str(int(is_synced)))))
    world.end("x", sender=sender)
    world.decisions._requests.settled = 2000.0
    assert world.decision("x")["exact"] is not is_synced


def test_request_with_half_of_its_bookings_is_explained_by_its_record(world: World) -> None:
    for name, worker in (("x", P), ("y", A)):
        world.book(name, worker, 1000.0, worker == P)
        world.end(name, prefill=P)
        shape = [(one["phase"], one["exact"]) for one in world.details(name)["decisions"]]
        assert shape == [("prefill", False), ("decode", False)]


def test_other_routers_are_not_explained_by_cost(world: World) -> None:
    sender = Sender("f", (("router", "random"),))
    data = msgspec.json.encode({"request": {"request_id": "y", "request_received_ms": 1}})
    world.decisions.take(sender, [Found(data, 0, 1)])
    assert not world.details("y")["request"]["why"]
    world.decisions._frontends[FRONTEND] = world.decisions._frontend(sender)
    world.end("x")
    assert any("random" in note for note in world.decision("x")["notes"])


def test_bad_settings_of_a_sender_are_the_defaults(world: World) -> None:
    found = world.decisions._frontend(Sender("f", (("credit", "much"),)))
    assert found.weights.credit == 1.5


def test_nothing_shown_has_a_hash(world: World) -> None:
    secret = 0x1234_5678_9ABC_DEF0
    world.end("x", replay={"trace_block_size": 32, "input_sequence_hashes": [secret] * 4})
    assert str(secret) not in str((world.decisions.requests(), world.details("x")))


async def test_caches_are_a_tree(world: World) -> None:
    world.store(A, 1.0, 1, 2)
    told = await world.decisions.caches()
    assert (told["blocks"], told["block_size"], len(told["tree"]["nodes"])) == (2, 32, 1)
    assert told["workers"][0] == {"id": "a00000", "rank": 0, "device": 2, "host": 0, "disk": 0}
    assert await world.decisions.caches() is told, "not made again at once"


async def test_request_that_cannot_be_listed_does_not_keep_the_others_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, twice = 0, asyncio.Event()

    def fail(before: float) -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            twice.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(module, "ARRIVE_SECONDS", 0.01)
    monkeypatch.setattr(world.decisions, "end_unrecorded", fail)
    running = asyncio.ensure_future(world.decisions._end_without_records())
    async with asyncio.timeout(30):
        await twice.wait()
    assert not running.done()
    running.cancel()
