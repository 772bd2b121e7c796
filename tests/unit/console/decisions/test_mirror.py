"""The mirror follows workers as they come, lose messages and go."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import zmq

from dynamo_vllm.console.decisions import events, snapshots
from dynamo_vllm.console.decisions import mirror as module
from dynamo_vllm.console.decisions.messages import ACTIVE, KV_EVENTS, Envelope
from dynamo_vllm.console.decisions.mirror import Booking, Mirror
from dynamo_vllm.console.decisions.shapes import Overlap, Worker
from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.serving.watch.discovery import Channel, Member, Seen
from harness.waiting import until_async

A = Worker(1)
PUBLISHER = 77


def stored(worker: int, *blocks: int) -> dict[str, Any]:
    named = [{"block_hash": one, "tokens_hash": one} for one in blocks]
    data = {"stored": {"parent_hash": None, "start_position": None, "blocks": named}}
    return {"worker_id": worker, "storage_tier": "device", "event": {"event_id": 1, "data": data}}


def booked(name: str, add: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": name, "worker": {"worker_id": 1, "dp_rank": 0}, "data": {"AddRequest": add}}


def member(instance: int, model: str = "m", block_size: int = 32) -> Member:
    return Member(instance, "backend", (model,), (), block_size)


class Publisher:
    """A worker's event channel."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self.address = "tcp://127.0.0.1:*"
        self.start()
        self.sequence = 0

    def start(self) -> None:
        self.socket = self._context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.address)
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)

    def stop(self) -> None:
        self.socket.close()

    async def subscribed(self) -> None:
        await until_async("a subscriber", lambda: self.socket.poll(0))
        self.socket.recv()

    def send(self, payload: object, topic: str = KV_EVENTS) -> None:
        now = int(time.time() * 1000)
        envelope = Envelope(PUBLISHER, self.sequence, now, topic, msgspec.msgpack.encode(payload))
        body = msgspec.msgpack.encode(envelope)
        head = b"\x01" + len(body).to_bytes(4, "big")
        numbers = [PUBLISHER.to_bytes(8, "big"), self.sequence.to_bytes(8, "big")]
        self.socket.send_multipart([topic.encode(), *numbers, head + body])
        self.sequence += 1


class World:
    """What discovery and snapshots say, and the mirror of it."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.snapshots: list[Mapping[str, int]] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.dump: list[dict[str, Any]] = []
        self.booked: list[Booking] = []
        channels = frozenset([Channel(KV_EVENTS, PUBLISHER, "backend", publisher.address)])
        self.seen = Seen(channels, {PUBLISHER: (1, 0)}, {1: member(1)})
        self.problem: str | None = None
        self.failure: Exception | None = None
        self.no_snapshot: DynamoVllmError | None = None
        self.mirror = Mirror(
            self, lambda before, block: before * 100 + block, self.take, self.booked.append, lambda *_: None
        )

    async def look(self) -> Seen:
        if self.failure:
            raise self.failure
        if self.problem:
            raise DynamoVllmError(self.problem)
        return self.seen

    async def take(self, sizes: Mapping[str, int]) -> list[bytes]:
        self.snapshots.append(sizes)
        if self.no_snapshot:
            raise self.no_snapshot
        await self.may_read.wait()
        return [msgspec.json.encode(self.dump)]

    async def hear(self, *blocks: int) -> None:
        """Know these blocks of the worker from its first message."""
        await self.publisher.subscribed()
        self.publisher.send([stored(1, *blocks)])
        await self.until_known(len(blocks))

    async def until_known(self, blocks: int) -> None:
        await until_async("the blocks", lambda: self.overlap == Overlap(blocks) and self.is_sure())

    async def begin_snapshot(self) -> None:
        """A snapshot that ends when it may."""
        self.may_read.clear()
        await until_async("a snapshot", lambda: self.snapshots)

    @property
    def overlap(self) -> Overlap | None:
        return self.mirror.blocks.overlaps([1, 102, 10203]).get(A)

    def is_sure(self) -> bool:
        return self.mirror.blocks.is_known(A, time.time())


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(module, "HEAR_SECONDS", 0.2)
    monkeypatch.setattr(events, "GATHER_SECONDS", 0.02)
    monkeypatch.setattr(snapshots, "SNAPSHOT_SECONDS", 0.05)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = World(Publisher(context))
    running = asyncio.ensure_future(made.mirror.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    made.publisher.socket.close()
    context.term()


async def test_worker_heard_from_its_first_message_needs_no_snapshot(world: World) -> None:
    await world.hear(1, 2)
    assert world.snapshots == []


async def test_one_read_follows_each_read(world: World) -> None:
    """However often somebody reads in between: else reads would become more and more."""
    await world.publisher.subscribed()
    feed = world.mirror._feed
    assert feed is not None
    waiting = []
    for _ in range(3):
        feed._gather()
        waiting.append(feed._next_read)
        world.mirror.catch_up()
    assert [one is not None and one.cancelled() for one in waiting] == [True] * 3
    assert feed._next_read is None
    world.publisher.send([stored(1, 1, 2)])
    await world.until_known(2)


async def test_silent_worker_is_read_from_a_snapshot(world: World) -> None:
    world.dump = [stored(1, 1, 2, 3), stored(99, 5)]
    await world.until_known(3)
    assert world.snapshots == [{"backend": 32}]
    assert world.mirror.blocks.workers == [A], "another deployment's worker is not ours"


async def test_lost_messages_lead_to_a_snapshot(world: World) -> None:
    await world.hear(1)
    world.dump = [stored(1, 1, 2, 3)]
    world.publisher.sequence += 3
    world.publisher.send([stored(1, 7)])
    await world.until_known(3)


async def test_discovery_is_followed_while_a_snapshot_is_taken(world: World) -> None:
    world.dump = [stored(1, 1, 2, 3), stored(2, 5)]
    await world.begin_snapshot()
    world.seen = Seen(world.seen.channels, {}, {2: member(2)})
    await until_async("the other worker", lambda: world.mirror._seen is world.seen)
    world.may_read.set()
    await until_async("the end of it", lambda: not world.mirror.snapshots.being_read)
    assert world.overlap is None  # it has left meanwhile
    assert A not in world.mirror.blocks.workers


async def test_messages_lost_while_a_snapshot_is_taken_lead_to_another(world: World) -> None:
    await world.publisher.subscribed()
    await world.begin_snapshot()
    world.publisher.sequence = 5
    world.publisher.send([stored(1, 1)])
    feed = world.mirror._feed
    assert feed is not None
    await until_async("the message", lambda: feed.is_heard(PUBLISHER))
    assert A in world.mirror.snapshots.wanted and A not in world.mirror.snapshots.being_read
    world.dump = [stored(1, 1, 2, 3)]
    world.may_read.set()
    await world.until_known(3)
    assert len(world.snapshots) == 2


async def test_too_many_events_during_a_snapshot_are_not_held(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MOST_HELD", 2)
    await world.publisher.subscribed()
    await world.begin_snapshot()
    world.publisher.send([stored(1, block) for block in (7, 8, 9)])
    await until_async("so many", lambda: A not in world.mirror.snapshots.being_read)
    assert A in world.mirror.snapshots.wanted and world.mirror.snapshots.held == []
    world.dump = [stored(1, 1, 2, 3)]
    world.may_read.set()
    await world.until_known(3)


async def test_worker_that_cannot_be_asked_stays_in_doubt(world: World) -> None:
    world.seen = dataclasses.replace(world.seen, members={1: member(1, block_size=0)})
    await until_async("it was silent", lambda: A in world.mirror.snapshots.wanted)
    await world.mirror.snapshots.refresh()
    assert world.snapshots == [] and A in world.mirror.snapshots.wanted and not world.is_sure()


async def test_worker_that_left_is_a_candidate_of_the_past(world: World) -> None:
    await world.hear(1)
    before = time.time()
    world.seen = Seen(members={2: member(2)})
    await until_async("the change", lambda: world.mirror.member(2) is not None)
    assert world.overlap is None
    assert world.mirror.candidates(Worker(2), before - 60) == [A, Worker(2)]
    assert world.mirror.candidates(Worker(2), time.time() + 60) == [Worker(2)]
    assert world.mirror.lost_between(1, before, time.time()) is not None


async def test_death_of_a_worker_is_noticed_before_discovery_tells(world: World) -> None:
    await world.hear(1)
    before = time.time()
    world.publisher.stop()
    await until_async("the loss", lambda: world.mirror.lost_between(1, before, time.time()))
    assert world.mirror.member(1) is not None
    world.publisher.start()
    await until_async("its return", lambda: not world.mirror.lost_between(1, before, time.time()))


async def test_worker_that_drains_is_not_lost(world: World) -> None:
    """Its endpoint is not listed any more, and its requests go on there."""
    await world.publisher.subscribed()
    before = time.time()
    world.seen = dataclasses.replace(world.seen, members={2: member(2)})
    await until_async("the change", lambda: world.mirror.member(2) is not None)
    assert world.mirror.lost_between(1, before, time.time() + 60) is None
    world.publisher.stop()
    await until_async("its end", lambda: world.mirror.lost_between(1, before, time.time()))


async def test_bookings_carry_the_load_before_them(world: World) -> None:
    await world.publisher.subscribed()
    add = {"token_sequence": [1, 102], "prefill_load_hint": {"initial_effective_prefill_tokens": 9}}
    for name in ("x", "y"):
        world.publisher.send({"events": [{**booked(name, add), "lora_name": "l"}]}, ACTIVE)
    await until_async("both", lambda: len(world.booked) == 2)
    first, second = world.booked
    assert (first.loads[A].requests, second.loads[A], second.adapter) == (0, (1, 9, 2), "l")


async def test_booking_near_that_of_another_frontend_is_in_doubt(world: World) -> None:
    def heard(publisher: int, at: float) -> Booking:
        add = {"token_sequence": [1], "prefill_load_hint": None}
        payload = msgspec.msgpack.encode({"events": [booked("x", add)]})
        world.mirror.take(Envelope(publisher, 0, int(at * 1000), ACTIVE, payload), False)
        return world.booked[-1]

    now = time.time()
    first, second, later = heard(7, now - 1.9), heard(7, now - 1.89), heard(8, now - 1.0)
    assert not any(world.mirror.did_others_book(one) for one in (first, second, later))
    near = heard(7, now - 0.9)
    assert world.mirror.did_others_book(near) and world.mirror.did_others_book(later)


async def test_discovery_that_is_away_is_said_and_tried_again(world: World) -> None:
    world.problem = "etcd does not answer"
    await until_async("the problem", lambda: world.mirror.why_not == world.problem)
    world.problem = None
    await until_async("the end of it", lambda: world.mirror.why_not is None)


async def test_caches_that_cannot_be_read_are_said_until_they_were(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.no_snapshot = DynamoVllmError("no router answers")
    await until_async("two tries", lambda: len(world.snapshots) > 1)
    assert world.mirror.snapshots.why_not == "no router answers"
    assert caplog.text.count("no router answers") == 1
    world.no_snapshot = None
    await until_async("the end of it", lambda: world.mirror.snapshots.why_not is None)


async def test_unexpected_exceptions_end_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.failure = RuntimeError("a bug")
    await until_async("the problem", lambda: "a bug" in (world.mirror.why_not or ""))
    world.failure = None
    await until_async("the end of it", lambda: world.mirror.why_not is None)

    await world.publisher.subscribed()
    monkeypatch.setattr(world.mirror, "_take_kv", fail)
    for _ in range(3):
        world.publisher.send([stored(1, 1)])
    told = "an event could not be taken"
    await until_async("the failure", lambda: told in caplog.text)
    feed = world.mirror._feed
    assert feed is not None
    await until_async("all", lambda: feed._last.get(PUBLISHER) == 2)
    monkeypatch.undo()
    world.publisher.send([stored(1, 1, 2)])
    await world.until_known(2)
    assert caplog.text.count(told) == 1


def fail(*_: Any) -> None:
    raise RuntimeError("a bug")


async def test_channel_that_cannot_be_connected_to_does_not_stop_the_others(world: World) -> None:
    await world.publisher.subscribed()
    known = world.seen
    bad = Channel(KV_EVENTS, 78, "backend", "no-such://address")
    world.seen = dataclasses.replace(known, channels=frozenset([*known.channels, bad]))
    await until_async("it was seen", lambda: world.mirror._seen is world.seen)
    world.seen = dataclasses.replace(known)
    await until_async("it is gone", lambda: world.mirror._seen is world.seen)
    assert world.mirror.why_not is None
    world.publisher.send([stored(1, 1, 2)])
    await world.until_known(2)


@pytest.mark.parametrize(("address", "word"), [(None, "NATS"), ("none", "--kv-events")])
async def test_what_cannot_be_shown_is_said(world: World, address: str | None, word: str) -> None:
    channels = frozenset([Channel(KV_EVENTS, 1, "backend", None)]) if address is None else frozenset()
    world.seen = Seen(channels, {}, world.seen.members)
    await until_async("the reason", lambda: word in (world.mirror.why_not or ""))
    assert world.mirror.can_explain == (address is not None)


async def test_candidates_follow_the_workers_that_come_and_go(world: World) -> None:
    await until_async("the worker", lambda: world.mirror.member(1))
    later = time.time() + 100
    assert world.mirror.candidates(A, later) is world.mirror.candidates(A, later), "it is made once"
    alike, other = member(2), member(3, "another")
    members = {**world.seen.members, 2: alike, 3: other}
    world.seen = Seen(world.seen.channels, world.seen.sources, members)
    await until_async("the others", lambda: world.mirror.member(3))
    assert world.mirror.candidates(A, later) == [A, Worker(2)]
    world.mirror.blocks.doubt(Worker(2, 1))
    assert world.mirror.candidates(A, later) == [A, Worker(2, 1)]
    assert world.mirror.candidates(A, time.time() - 50) == [A]
