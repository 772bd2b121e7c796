"""Keeps the last requests: rows of the list, and what is known of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.console.decisions import explain
from dynamo_vllm.console.decisions.load import PastLoad
from dynamo_vllm.console.decisions.otlp import Unread
from dynamo_vllm.console.decisions.shapes import Frontend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dynamo_vllm.console.decisions.explain import Decision
    from dynamo_vllm.console.decisions.load import Stay
    from dynamo_vllm.console.decisions.mirror import Booking
    from dynamo_vllm.console.decisions.records import Ended
    from dynamo_vllm.console.decisions.shapes import Worker

MOST = 2000
MOST_ANSWERED = 1000
"""Rows in one answer."""
MOST_BLOCKS = 500_000
"""Blocks of the prompts of all requests that were read; each takes about 40 bytes."""
MOST_BYTES = 32 << 20
"""Bytes of all records that were not read."""


@dataclass(slots=True)
class Request:
    """A request that has ended."""

    ended: Ended
    bookings: Sequence[Booking]
    stays: Sequence[Stay]
    """Where it was, if there are no bookings."""
    frontend: Frontend
    model: str | None
    adapter: str | None
    left: float | None
    """When its worker died or left before it ended; then it went on elsewhere, or failed."""
    can_explain: bool
    decisions: Sequence[Decision] | None = None
    """None until they are asked for."""


class Kept(msgspec.Struct, eq=False, gc=False):
    """A record, which is read when it is needed."""

    at: float
    """When it came, which is after the request ended."""
    frontend: Frontend
    unread: Unread | None
    request: Request | None = None


class Requests:
    """A ring. `name` returns the short name of a worker, `read` what a record says, or None.

    Twice as many requests are kept as are shown: the older ones say what workers did when the others came.
    """

    def __init__(
        self,
        name: Callable[[int], str],
        read: Callable[[Frontend, Unread], Request | None],
        explain: Callable[[Request], Sequence[Decision]],
        most: int = MOST,
        most_blocks: int = MOST_BLOCKS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._name = name
        self._read = read
        self._explain = explain
        self._most = most
        self._most_blocks = most_blocks
        self._most_bytes = most_bytes
        self._kept: deque[Kept] = deque()
        self._by_id: dict[str, Kept] = {}
        self._blocks = 0
        self._bytes = 0
        self._begins = 0.0
        self._count = 0
        self.settled = 0.0
        """All requests that were active before this time have ended."""

    @property
    def dropped(self) -> int:
        """Return how many requests are no longer shown."""
        return max(0, self._count - self._most)

    @property
    def count(self) -> int:
        """Return how many are kept, also those that are no longer shown."""
        return len(self._kept)

    def add(self, at: float, frontend: Frontend, unread: Sequence[Unread]) -> list[Kept]:
        """Add records that came at this time."""
        kept = [Kept(at, frontend, one) for one in unread]
        self._bytes += sum(one.size for one in unread)
        self._extend(kept)
        while self._bytes > self._most_bytes and self._kept:
            self._drop()
        return kept

    def add_unrecorded(self, at: float, request: Request) -> Kept:
        """Add a request that has no record."""
        kept = Kept(at, request.frontend, None)
        self._extend([kept])
        self._note(kept, request)
        return kept

    def _extend(self, kept: Sequence[Kept]) -> None:
        self._kept.extend(kept)
        self._count += len(kept)
        for _ in range(len(self._kept) - 2 * self._most):
            self._drop()

    def of(self, kept: Kept) -> Request | None:
        """Read a record if that was not done yet."""
        if kept.unread is not None:
            unread, kept.unread = kept.unread, None
            self._bytes -= unread.size
            request = self._read(kept.frontend, unread)
            if request is not None:
                self._note(kept, request)
        return kept.request

    def _note(self, kept: Kept, request: Request) -> None:
        before = self._by_id.get(request.ended.id)
        if before is not None:
            self._forget(before)  # listed without a record, which came later
        kept.request = request
        self._by_id[request.ended.id] = kept
        self._blocks += len(request.ended.blocks)
        while self._blocks > self._most_blocks and len(self._kept) > 1:
            self._drop()

    def _drop(self) -> None:
        kept = self._kept.popleft()
        if kept.request is not None:
            self._begins = max(self._begins, kept.request.ended.ended)
            self._forget(kept)
        elif kept.unread is not None:
            self._begins = max(self._begins, kept.at)
            self._bytes -= kept.unread.size
            kept.unread = None

    def _forget(self, kept: Kept) -> None:
        if kept.request is not None:
            self._blocks -= len(kept.request.ended.blocks)
            del self._by_id[kept.request.ended.id]
            kept.request = None

    def rows(
        self, limit: int = 100, before: str | None = None, worker: str | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """Return the newest first; `before` is the id of the last row that the caller has."""
        fitting = (
            row
            for request in self._older_than(before)
            if (row := self.row(request))
            and (worker is None or worker in (row["worker"], row["prefill_worker"]))
            and (model is None or model in (row["model"], row["adapter"]))
        )
        chosen = list(islice(fitting, max(0, min(limit, MOST_ANSWERED))))
        return {"requests": chosen, "dropped": self.dropped}

    def _older_than(self, before: str | None) -> Iterator[Request]:
        shown = list(islice(reversed(self._kept), self._most))
        newest_first = (request for kept in shown if (request := self.of(kept)) is not None)
        if before is not None and before in self._by_id:
            for request in newest_first:
                if request.ended.id == before:
                    break
        return newest_first

    def details(self, request_id: str) -> dict[str, Any] | None:
        """Return everything about a request; None if it is not shown."""
        shown = islice(reversed(list(self._kept)), self._most)
        requests = (request for kept in shown if (request := self.of(kept)) is not None)
        request = next((one for one in requests if one.ended.id == request_id), None)
        if request is None:
            return None
        past = self._past()
        decisions = [explain.shown(d, past, self.settled, self._name) for d in self.explained(request)]
        return {
            "request": self.row(request),
            "decisions": decisions,
            "timeline": self._timeline(request),
        }

    def explained(self, request: Request) -> Sequence[Decision]:
        """Return its decisions, as the mirror can tell them now if they were not asked for before."""
        if request.decisions is None:
            request.decisions = self._explain(request)
        return request.decisions

    def _past(self) -> PastLoad:
        requests = [request for kept in list(self._kept) if (request := self.of(kept)) is not None]
        return PastLoad([stay for request in requests for stay in request.stays], self._begins)

    def row(self, request: Request) -> dict[str, Any]:
        ended = request.ended
        worker = _last(request, is_prefill=False) or ended.worker
        prefill = _last(request, is_prefill=True) or ended.prefill_worker
        first = ended.first_token
        return {
            "id": ended.id,
            "at": ended.received,
            "model": request.model,
            "adapter": request.adapter,
            "tenant": None,
            "input_tokens": ended.input_tokens,
            "output_tokens": ended.output_tokens,
            "cached_tokens": ended.cached_tokens,
            "ttft_ms": None if first is None else _ms(first - ended.received),
            "total_ms": _ms(ended.ended - ended.received),
            "worker": None if worker is None else self._name(worker.instance),
            "prefill_worker": None if prefill is None else self._name(prefill.instance),
            # The record does not say how a request ended. Failed ones and embeddings have no tokens.
            "outcome": "ok" if ended.output_tokens else "unknown",
            "why": request.can_explain,
        }

    def _timeline(self, request: Request) -> list[dict[str, Any]]:
        ended = request.ended
        first = ended.first_token
        worker = None if ended.worker is None else self._name(ended.worker.instance)
        prefill = worker if ended.prefill_worker is None else self._name(ended.prefill_worker.instance)
        booked = [one for one in self.explained(request) if one.is_booked]
        moved = [one for one in booked if one.attempt > 1]
        parts: list[tuple[str, float, float, str | None]] = [
            ("received", ended.received, ended.received, None),
            ("queued", ended.received, ended.routed, None),
            ("routed", ended.routed, ended.routed, prefill),
        ]
        begin = first
        if first is not None:
            parts.append(("prefill", ended.routed, first, prefill))
        if first is not None and ended.prefill_worker is not None:
            begin = min(ended.ended, first + (ended.transfer_seconds or 0.0))
            parts.append(("transfer", first, begin, worker))
        parts += [("migrated", one.at, one.at, self._name(one.chosen.instance)) for one in moved]
        if not moved and request.left is not None:
            parts.append(("migrated", request.left, request.left, None))
        if begin is not None:
            last = _last(request, is_prefill=False)
            where = worker if last is None else self._name(last.instance)
            parts.append(("decode", begin, ended.ended, where))
        parts.append(("ended", ended.ended, ended.ended, None))
        parts.sort(key=lambda one: one[1])
        return [
            {
                "what": what,
                "from_ms": _ms(begin - ended.received),
                "to_ms": _ms(end - ended.received),
                "worker": name,
            }
            for what, begin, end, name in parts
        ]


def _last(request: Request, is_prefill: bool) -> Worker | None:
    """Return the worker that was booked last: after a migration the record still names the first."""
    found = [one for one in request.bookings if one.is_prefill == is_prefill]
    return max(found, key=lambda one: one.at).worker if found else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
