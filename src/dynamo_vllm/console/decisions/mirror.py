"""Mirrors what routers know: who can be chosen, what is cached where, which requests are active.

It only listens. Candidates come from discovery, caches from the workers' KV events, active requests from
frontends with --router-replica-sync. Who was not heard from the beginning is read from a snapshot.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.console.decisions import messages
from dynamo_vllm.console.decisions.block_map import BlockMap
from dynamo_vllm.console.decisions.events import EventFeed
from dynamo_vllm.console.decisions.load import LiveLoad
from dynamo_vllm.console.decisions.shapes import Worker
from dynamo_vllm.console.decisions.snapshots import Snapshots, apply
from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.serving.watch.discovery import Seen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from dynamo_vllm.console.decisions.messages import ActiveEvent, Envelope
    from dynamo_vllm.console.decisions.shapes import Load
    from dynamo_vllm.serving.watch.discovery import Channel, Member

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
HEAR_SECONDS = 1.5
"""How long a new worker may take for its first message, before a snapshot is taken."""
GONE_SECONDS = 600.0
"""How long a worker that is gone can still be named as a candidate of an earlier request."""
MOST_GONE = 1000
SKEW_SECONDS = 2.0
"""A publisher's clock is believed if it differs by less from ours."""
SETTLE_SECONDS = 120.0
"""After lost bookings, loads are taken for exact again after this time."""
RACE_SECONDS = 0.002
"""A router books a moment after it chose; what ended so shortly before may have counted in the choice."""
OTHERS_SECONDS = 0.25
"""So long a frontend may take to hear of what another one booked."""
MOST_MOMENTS = 5000
NEVER = float("inf")


class Discovery(Protocol):
    async def look(self) -> Seen: ...


@dataclass(frozen=True, slots=True)
class Booking:
    """A frontend has chosen a worker for a request."""

    request: str
    worker: Worker
    is_prefill: bool
    """Whether it is a prefill worker, to which another for decode belongs."""
    at: float
    blocks: Sequence[int]
    loads: Mapping[Worker, Load]
    """Of all candidates, just before."""
    prefill_tokens: int
    adapter: str | None
    is_exact: bool
    publisher: int = 0
    """The frontend's."""


@dataclass(frozen=True, slots=True)
class _Presence:
    member: Member
    since: float
    until: float = NEVER


class Mirror:
    """`snapshot` returns what workers have cached, by address (component) with the size of their blocks."""

    def __init__(
        self,
        discovery: Discovery,
        chain: Callable[[int, int], int],
        snapshot: Callable[[Mapping[str, int]], Awaitable[list[bytes]]],
        on_booking: Callable[[Booking], None],
        on_free: Callable[[str, Worker, float], None],
    ) -> None:
        self.blocks = BlockMap(chain)
        self.live = LiveLoad()
        self.snapshots = Snapshots(self.blocks, snapshot, self.member)
        self._discovery = discovery
        self._on_booking = on_booking
        self._on_free = on_free
        self._feed: EventFeed | None = None
        self._seen = Seen()
        self._is_first = True
        self._present: dict[int, _Presence] = {}
        self._gone: deque[_Presence] = deque(maxlen=MOST_GONE)
        self._alike: dict[tuple[str, tuple[str, ...]], list[Worker]] = {}
        """Candidates by component and models, since the workers last changed."""
        self._unchanged_since = NEVER
        self._ranked = 0
        self._lost: dict[int, float] = {}
        """When a worker died or ended. Discovery still lists one that died for some time; one that drains and
        still answers it lists only as a publisher."""
        self._to_hear: dict[int, float] = {}
        """Publishers of KV events that said nothing yet, and until when they may."""
        self._moments: dict[int, deque[float]] = {}
        """When each frontend booked or freed something."""
        self._loads_since = NEVER
        """From when on all bookings are known."""
        self._relieved: dict[Worker, float] = {}
        """When a request last gave its first token or ended at a worker."""
        self.why_not: str | None = None
        """Why nothing can be shown."""
        self.can_explain = True
        """Whether caches are known, or there are none that routers know of."""

    async def run(self) -> None:
        """Run until cancelled."""
        feed = self._feed = EventFeed(self.take, self.hear_connection)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._repeat(functools.partial(self._look, feed)))
                tasks.create_task(self._repeat(self.snapshots.refresh))  # which may take a minute
        finally:
            self._feed = None
            feed.close()

    async def _repeat(self, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await do()
            except DynamoVllmError as exc:
                self._say(str(exc))
            except Exception as exc:  # what goes wrong once must not end the console
                self._say(f"the deployment cannot be followed: {exc!r}", exc)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, feed: EventFeed) -> None:
        self.see(await self._discovery.look(), feed, self._is_first)
        self._is_first = False
        self._note_silent(feed)

    def _say(self, why: str, exc: Exception | None = None) -> None:
        if self.why_not != why:
            logger.warning("routing decisions: %s", why, exc_info=exc)
        self.why_not = why

    def catch_up(self) -> None:
        """Read the messages that have come: a request is booked before its record comes."""
        if self._feed is not None:
            self._feed.catch_up()

    # --- who is there

    def see(self, seen: Seen, feed: EventFeed, is_first: bool = False) -> None:
        now = time.time()
        self.why_not = _why_not(seen)
        if seen is self._seen:
            return
        self.can_explain = not _are_unread(_kv_channels(seen))
        self._alike.clear()
        self._unchanged_since = now
        before, listed = _listed(self._seen), _listed(seen)
        for instance in before - listed:
            self._lose(instance, now)
        for instance in listed - before:
            self._lost.pop(instance, None)
        for instance in self._present.keys() - seen.members.keys():
            self._leave(instance, now)
        self.snapshots.keep(listed)
        for instance, member in seen.members.items():
            known = self._present.get(instance)
            since = known.since if known else (0.0 if is_first else now - LOOK_SECONDS)
            self._present[instance] = _Presence(member, since)
        wanted = [c for c in seen.channels if c.topic in (messages.KV_EVENTS, messages.ACTIVE)]
        for publisher in seen.sources.keys() - self._seen.sources.keys():
            self._to_hear[publisher] = time.monotonic() + HEAR_SECONDS
            self.blocks.doubt(Worker(*seen.sources[publisher]))
        self._seen = seen
        publishers = {channel.publisher for channel in wanted}
        self._moments = {one: moments for one, moments in self._moments.items() if one in publishers}
        feed.follow([c.address for c in wanted if c.address is not None], publishers)

    def hear_connection(self, address: str, is_there: bool) -> None:
        """Note whose process has ended: its connection breaks at once."""
        publishers = {channel.publisher for channel in self._seen.channels if channel.address == address}
        for publisher in publishers & self._seen.sources.keys():
            instance, _ = self._seen.sources[publisher]
            if is_there:
                self._lost.pop(instance, None)
            else:
                self._lose(instance, time.time())

    def _lose(self, instance: int, at: float) -> None:
        self._lost.setdefault(instance, at)
        if len(self._lost) > MOST_GONE:
            del self._lost[next(iter(self._lost))]

    def _leave(self, instance: int, now: float) -> None:
        gone = self._present.pop(instance)
        self._gone.append(_Presence(gone.member, gone.since, now))
        for worker in [w for w in self.blocks.workers if w.instance == instance]:
            self.blocks.forget(worker, now)
            self.live.forget(worker)
            self._relieved.pop(worker, None)

    def member(self, instance: int) -> Member | None:
        """Return a worker that is there, or was lately."""
        known = self._present.get(instance)
        if known is None:
            known = next((gone for gone in self._gone if gone.member.instance == instance), None)
        return None if known is None else known.member

    @property
    def instances(self) -> list[int]:
        """Return all workers that are there, or were lately."""
        return [*self._present, *(gone.member.instance for gone in self._gone)]

    def lost_between(self, instance: int, begin: float, end: float) -> float | None:
        """Return when a worker died or ended, if it did within this time."""
        lost = self._lost.get(instance)
        return lost if lost is not None and begin < lost < end else None

    def candidates(self, chosen: Worker, at: float) -> Sequence[Worker]:
        """Return who else could have been chosen then: same component, same model."""
        own = self.member(chosen.instance)
        if own is None:
            return [chosen]
        if self._ranked != self.blocks.worker_count:
            self._ranked = self.blocks.worker_count
            self._alike.clear()
        if at >= self._unchanged_since:
            alike = self._alike.get((own.component, own.models))
            if alike is None:
                alike = self._alike[own.component, own.models] = self._candidates(own, at)
            if chosen in alike:
                return alike
        return sorted({chosen, *self._candidates(own, at)})

    def _candidates(self, own: Member, at: float) -> list[Worker]:
        ranks: dict[int, set[Worker]] = {}
        for worker in (*(Worker(*source) for source in self._seen.sources.values()), *self.blocks.workers):
            ranks.setdefault(worker.instance, set()).add(worker)
        found: set[Worker] = set()
        for one in (*self._present.values(), *self._gone):
            is_alike = one.member.component == own.component and one.member.models == own.models
            if is_alike and one.since <= at < one.until:
                found |= ranks.get(one.member.instance) or {Worker(one.member.instance)}
        return sorted(found)

    # --- what they say

    def take(self, envelope: Envelope, is_gap: bool) -> None:
        at = _time(envelope)
        if envelope.topic == messages.KV_EVENTS:
            self._take_kv(envelope, is_gap, at)
        elif envelope.topic == messages.ACTIVE:
            if is_gap:
                self._loads_since = at + SETTLE_SECONDS
            elif self._loads_since == NEVER:
                self._loads_since = at
            publisher = envelope.publisher_id
            self._moments.setdefault(publisher, deque(maxlen=MOST_MOMENTS)).append(at)
            for event in messages.active_events(envelope):
                self._take_active(event, at, publisher)

    def _take_kv(self, envelope: Envelope, is_gap: bool, at: float) -> None:
        events = messages.kv_events(envelope)
        is_new = self._to_hear.pop(envelope.publisher_id, None) is not None
        workers = [Worker(event.worker_id, event.event.dp_rank) for event in events]
        for worker in set(workers) if is_gap or is_new else ():
            if is_gap:
                self.blocks.doubt(worker)
                self.snapshots.ask(worker)
            elif worker not in self.snapshots.wanted:
                self.blocks.begin(worker, 0.0)  # this is its first message
        for worker, event in zip(workers, events, strict=True):
            if not self.snapshots.holds(worker, event, at):
                apply(self.blocks, worker, event, at)

    def did_others_book(self, booking: Booking) -> bool:
        """Return whether another frontend booked or freed something of which this one may not have known."""
        # A frontend has a publisher for each component; what it books for the others does not count here.
        components = {channel.publisher: channel.component for channel in self._seen.channels}
        own = components.get(booking.publisher)
        for publisher, moments in self._moments.items():
            if publisher == booking.publisher or components.get(publisher) != own:
                continue
            if len(moments) == MOST_MOMENTS and moments[0] > booking.at - OTHERS_SECONDS:
                return True  # too long ago to know
            later = itertools.takewhile(lambda at: at > booking.at - OTHERS_SECONDS, reversed(moments))
            if any(at < booking.at + OTHERS_SECONDS for at in later):
                return True
        return False

    def _take_active(self, event: ActiveEvent, at: float, publisher: int = 0) -> None:
        worker = Worker(event.worker.worker_id, event.worker.dp_rank)
        if isinstance(event.data, str):
            self._relieved[worker] = at
            if event.data == "Free":
                self.live.free(event.request_id, worker)
                self._on_free(event.request_id, worker, at)
            else:
                self.live.prefilled(event.request_id, worker)
            return
        add = event.data.AddRequest
        blocks = add.token_sequence or ()
        loads = self.live.of(self.candidates(worker, at), blocks)
        hint = add.prefill_load_hint
        tokens = hint.initial_effective_prefill_tokens if hint and add.track_prefill_tokens else 0
        self.live.add(event.request_id, worker, blocks, tokens)
        last = max((self._relieved.get(one, 0.0) for one in loads), default=0.0)
        is_exact = self._loads_since <= at and at - last > RACE_SECONDS
        self._on_booking(
            Booking(
                event.request_id,
                worker,
                add.token_sequence is None,
                at,
                blocks,
                loads,
                tokens,
                event.lora_name,
                is_exact,
                publisher,
            )
        )

    # --- snapshots

    def _note_silent(self, feed: EventFeed) -> None:
        """Have those read from a snapshot that said nothing since we listen."""
        now = time.monotonic()
        for publisher, until in list(self._to_hear.items()):
            if publisher not in self._seen.sources:
                del self._to_hear[publisher]
            elif until < now and not feed.is_heard(publisher):
                del self._to_hear[publisher]
                self.snapshots.ask(Worker(*self._seen.sources[publisher]))

    def ask_snapshot(self, worker: Worker) -> None:
        """Read a worker's cache again: the router said another figure than the mirror."""
        if worker in self.blocks.workers:
            self.blocks.doubt(worker)
            self.snapshots.ask(worker)


def _kv_channels(seen: Seen) -> list[Channel]:
    return [channel for channel in seen.channels if channel.topic == messages.KV_EVENTS]


def _listed(seen: Seen) -> set[int]:
    return {*seen.members, *(instance for instance, _ in seen.sources.values())}


def _are_unread(kv: Sequence[Channel]) -> bool:
    return bool(kv) and all(channel.address is None for channel in kv)


def _why_not(seen: Seen) -> str | None:
    kv = _kv_channels(seen)
    if _are_unread(kv):
        return "KV events go through NATS, which the console does not read; use --event-plane zmq"
    if seen.members and not kv:
        return "no worker publishes KV events; start workers with --kv-events"
    return None


def _time(envelope: Envelope) -> float:
    """Return when a message was sent, by our clock: we may be late to read it."""
    now = time.time()
    sent = envelope.published_at / 1000
    return min(sent, now) if abs(now - sent) < SKEW_SECONDS else now
