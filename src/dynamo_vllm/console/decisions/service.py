"""Explains routing decisions for the console: the last requests, why they went where, and what is cached."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.config import planes
from dynamo_vllm.console.decisions import explain, records
from dynamo_vllm.console.decisions.allowance import Allowance
from dynamo_vllm.console.decisions.mirror import Mirror
from dynamo_vllm.console.decisions.otlp import Malformed, Receiver
from dynamo_vllm.console.decisions.requests import Request, Requests
from dynamo_vllm.console.decisions.shapes import Frontend, Weights, Worker
from dynamo_vllm.console.decisions.tree import prefix_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.config.options import ReachOptions
    from dynamo_vllm.console.decisions.mirror import Booking
    from dynamo_vllm.console.decisions.otlp import Unread
    from dynamo_vllm.console.decisions.records import Ended
    from dynamo_vllm.console.decisions.requests import Kept
    from dynamo_vllm.serving.watch.request_trace import Sender

    Row = Callable[[], dict[str, Any] | None]
    """Makes a row of the list; None if its record cannot be read."""

logger = logging.getLogger(__name__)
MOST_PENDING = 5000
"""Requests that were booked and have not ended."""
TREE_SECONDS = 2.0
TREE_SHARE = 0.003
"""The part of a core that making the tree may take."""
EXPLAIN_SHARE, EXPLAIN_SECONDS = 0.002, 0.1
"""The part of a core for explaining requests as they end, and how much of it may be saved up."""
MOST_TOLD = 50
"""Rows of records that came together; earlier ones are in the list for those who ask."""
RETRY_SECONDS = 5.0
ARRIVE_SECONDS = 2.5
"""The records of ended requests have arrived after this time; frontends send them every second."""
DISAGREEMENTS = 5
"""So often in a row the router may count other blocks at a worker, before the worker is read again."""


def short_name(instance: int) -> str:
    return f"{instance:016x}"[:6]


class Decisions:
    """`trace_url` is where frontends send records (`request_trace.new_url`); without it there are no rows.

    `on_rows` is called with new rows, on the loop of `run`. All methods are for that loop.
    """

    def __init__(
        self,
        options: ReachOptions,
        environment: Mapping[str, str],
        trace_url: str | None,
        *,
        name: Callable[[int], str] = short_name,
        on_rows: Callable[[Sequence[Row]], None] = lambda rows: None,
    ) -> None:
        self._options = options
        self._access = planes.etcd_access(options, environment)
        self._trace_url = trace_url
        self._name = name
        self._on_rows = on_rows
        self._requests = Requests(name, self._read, self._explain)
        self._explaining = Allowance(EXPLAIN_SHARE, EXPLAIN_SECONDS)
        self._skipped = 0
        """Requests since the last one whose blocks were counted as used; that one stands for them."""
        self._mirror: Mirror | None = None
        self._booked: OrderedDict[str, list[Booking]] = OrderedDict()
        self._disagreed: Counter[Worker] = Counter()
        self._frontends: dict[Sender, Frontend] = {}
        self._receiver_problem: str | None = None
        self._freed: deque[tuple[float, str, Worker]] = deque(maxlen=MOST_PENDING)
        self._idle: deque[float] = deque(maxlen=8)
        self._tree: dict[str, Any] | None = None
        self._next_tree = 0.0
        self._making_tree: asyncio.Task[dict[str, Any]] | None = None

    async def run(self) -> None:
        """Listen until cancelled. What fails is tried again; it never ends the console."""
        from dynamo_vllm.serving.watch import block_hashes, discovery, kv_snapshot

        async def snapshot(sizes: Mapping[str, int]) -> list[bytes]:
            named = {f"{self._options.namespace}.{c}.{discovery.GENERATE}": n for c, n in sizes.items()}
            return await kv_snapshot.take(self._options, named)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._end_without_records())
            try:
                opened = discovery.open_discovery(self._options, self._access)
            except discovery.NotReadable as exc:
                self._receiver_problem = str(exc)
                return
            async with opened as found:
                self._mirror = Mirror(found, block_hashes.chain, snapshot, self._book, self._free)
                await self._mirror.run()

    async def _receive(self) -> None:
        if self._trace_url is None:
            self._receiver_problem = "frontends send no records of requests; serve sets this up"
            return
        while True:
            try:
                await Receiver(self._trace_url, self.take).run()
            except OSError as exc:
                self._receiver_problem = f"records of requests cannot be received: {exc}"
                logger.warning("%s", self._receiver_problem)
            await asyncio.sleep(RETRY_SECONDS)

    # --- what is told

    def take(self, sender: Sender, unread: Sequence[Unread]) -> None:
        """Take the records of ended requests. Of many, only as many are read at once as that may cost."""
        if self._mirror is not None:
            self._mirror.catch_up()
        kept = self._requests.add(time.time(), self._frontend(sender), unread)
        for number, one in enumerate(kept):
            if not self._booked and not self._explaining.has_some():
                self._skipped += len(kept) - number
                break
            began = time.thread_time()
            self._skipped += 1
            self._explain_now(one)
            self._explaining.spend(time.thread_time() - began)
        self._on_rows([functools.partial(self._row, one) for one in kept[-MOST_TOLD:]])

    def _row(self, kept: Kept) -> dict[str, Any] | None:
        request = self._requests.of(kept)
        return None if request is None else self._requests.row(request)

    def _explain_now(self, kept: Kept) -> None:
        """Explain a request while what the router knew is fresh, and count what it used."""
        request = self._requests.of(kept)
        if request is None or self._mirror is None:
            return
        self._mirror.blocks.use(request.ended.blocks, request.ended.ended, self._skipped)
        self._skipped = 0
        self._compare(self._requests.explained(request))

    def _read(self, frontend: Frontend, unread: Unread) -> Request | None:
        try:
            ended = records.read(unread.payload())
        except (records.Unreadable, Malformed) as exc:
            logger.debug("a record of a request cannot be read: %s", exc)
            return None
        bookings = self._booked.pop(ended.id, [])
        return self._request(ended, bookings if explain.is_booked_whole(ended, bookings) else (), frontend)

    def _request(self, ended: Ended, bookings: Sequence[Booking], frontend: Frontend) -> Request:
        member = left = None
        if self._mirror is not None and ended.worker is not None:
            member = self._mirror.member(ended.worker.instance)
            left = self._mirror.lost_between(ended.worker.instance, ended.received, ended.ended)
        return Request(
            ended,
            bookings,
            () if bookings else explain.stays(ended, frontend),
            frontend,
            model=member.models[0] if member is not None and member.models else None,
            adapter=next((booking.adapter for booking in bookings if booking.adapter), None),
            left=left,
            can_explain=self._can_explain and (bool(bookings) or ended.worker is not None),
        )

    @property
    def _can_explain(self) -> bool:
        return self._mirror is not None and self._mirror.can_explain

    def _explain(self, request: Request) -> Sequence[explain.Decision]:
        if self._mirror is None or not self._can_explain:
            return []
        return explain.decisions(
            request.ended, request.bookings, request.stays, self._mirror, request.frontend
        )

    def _frontend(self, sender: Sender) -> Frontend:
        known = self._frontends.get(sender)
        if known is None:
            try:
                settings = dict(sender.settings)
                is_synced = settings.pop("is_synced", "0") == "1"
                weights = msgspec.convert(settings, Weights, strict=False)
            except msgspec.ValidationError:
                weights, is_synced = Weights(), False
            known = Frontend(sender.name, weights, is_synced)
            if len(self._frontends) > 100:
                self._frontends.clear()
            self._frontends[sender] = known
        return known

    def _compare(self, found: Sequence[explain.Decision]) -> None:
        """Read a worker's cache again if the router keeps counting other blocks there."""
        for decision in found:
            if decision.cached.fits:
                self._disagreed.pop(decision.chosen, None)
                continue
            self._disagreed[decision.chosen] += 1
            if self._disagreed[decision.chosen] >= DISAGREEMENTS and self._mirror is not None:
                del self._disagreed[decision.chosen]
                self._mirror.ask_snapshot(decision.chosen)

    def _book(self, booking: Booking) -> None:
        self._booked.setdefault(booking.request, []).append(booking)
        if len(self._booked) > MOST_PENDING:
            self._booked.popitem(last=False)

    def _free(self, request: str, worker: Worker, at: float) -> None:
        """A request that is freed may move. Its record ends it, or the lack of one."""
        bookings = self._booked.get(request)
        if bookings and bookings[-1].worker == worker:
            self._freed.append((at, request, worker))

    async def _end_without_records(self) -> None:
        """List requests of frontends that send bookings and no records."""
        while True:
            await asyncio.sleep(ARRIVE_SECONDS)
            try:
                self.end_unrecorded(time.time() - 2 * ARRIVE_SECONDS)
            except Exception:  # what goes wrong with one must not end the others
                logger.exception("a request without a record could not be listed")

    def end_unrecorded(self, before: float) -> None:
        """List those that were freed before a time, and are not booked elsewhere since."""
        while self._freed and self._freed[0][0] < before:
            at, request, worker = self._freed.popleft()
            bookings = self._booked.get(request, [])
            if self._mirror is None or not bookings or bookings[-1].worker != worker:
                continue
            del self._booked[request]
            ended = explain.ended_by_bookings(bookings, at, self._mirror)
            kept = self._requests.add_unrecorded(at, self._request(ended, bookings, _UNKNOWN))
            self._skipped += 1
            self._explain_now(kept)
            self._on_rows([functools.partial(self._row, kept)])

    def note_idle(self, at: float) -> None:
        """Note that no frontend had a request in flight at this time: all loads before it are known soon."""
        arrived = [one for one in self._idle if one <= time.time() - ARRIVE_SECONDS]
        if at <= time.time() - ARRIVE_SECONDS:
            arrived.append(at)
        self._idle.append(at)
        self._requests.settled = max(self._requests.settled, *arrived, 0.0)

    # --- what is asked

    def problems(self) -> list[str]:
        """Return why something is not shown."""
        mirror = self._mirror
        of_mirror = () if mirror is None else (mirror.why_not, mirror.snapshots.why_not)
        return [problem for problem in (self._receiver_problem, *of_mirror) if problem]

    def requests(
        self, limit: int = 100, before: str | None = None, worker: str | None = None, model: str | None = None
    ) -> dict[str, Any]:
        return {**self._requests.rows(limit, before, worker, model), "notes": self.problems()}

    def request(self, request_id: str) -> dict[str, Any] | None:
        """Return None for a request that is not kept."""
        return self._requests.details(request_id)

    async def caches(self) -> dict[str, Any]:
        """Return what is cached where; made at most every two seconds, less often if it takes long."""
        if self._tree is not None and time.monotonic() < self._next_tree:
            return self._tree
        if self._making_tree is None or self._making_tree.done():
            self._making_tree = asyncio.ensure_future(self._make_tree())
        return await asyncio.shield(self._making_tree)

    async def _make_tree(self) -> dict[str, Any]:
        mirror = self._mirror
        if mirror is None:
            return {"at": time.time(), "block_size": 0, "blocks": 0, "workers": [], "tree": _NO_TREE}
        began = time.thread_time()
        masks, parents, uses, workers = mirror.blocks.tables()
        make = functools.partial(prefix_tree, masks, parents, uses, workers, self._shown)
        tree, seconds = await asyncio.to_thread(_timed, make)
        sizes = [m.block_size for w in workers.values() if (m := mirror.member(w.instance)) and m.block_size]
        totals = [
            {"id": self._name(worker.instance), "rank": worker.rank, **tiers._asdict()}
            for worker, tiers in mirror.blocks.totals().items()
        ]
        self._tree = {
            "at": time.time(),
            "block_size": max(sizes, default=0),
            "blocks": len(masks),
            "workers": totals,
            "tree": tree,
        }
        seconds += time.thread_time() - began
        self._next_tree = time.monotonic() + max(TREE_SECONDS, seconds / TREE_SHARE)
        return self._tree

    def _shown(self, worker: Worker) -> str:
        return self._name(worker.instance)


_UNKNOWN = Frontend("", Weights(), is_synced=True)
"""A frontend that sends no records; its settings are taken for the defaults."""
_NO_TREE: dict[str, Any] = {"nodes": [], "left_out": 0}


def _timed(make: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    began = time.thread_time()
    return make(), time.thread_time() - began
