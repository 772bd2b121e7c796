"""Says what each worker was doing when a request was routed.

`LiveLoad` follows the bookings that frontends with --router-replica-sync publish, and is exact. `PastLoad`
finds it out afterwards, from the times of requests that have ended: to the millisecond, and without requests
that still run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dynamo_vllm.console.decisions.shapes import Load

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dynamo_vllm.console.decisions.shapes import Worker

MOST_ACTIVE = 20_000
"""Active requests that are followed; a frontend that crashes never frees its own."""


@dataclass(slots=True)
class _Active:
    worker: Worker
    blocks: Collection[int]
    prefill_tokens: int


class LiveLoad:
    """The active requests, by worker. A request may be active at a prefill and at a decode worker."""

    def __init__(self) -> None:
        self._active: dict[tuple[str, Worker], _Active] = {}
        self._blocks: dict[Worker, Counter[int]] = {}
        self._requests: Counter[Worker] = Counter()
        self._prefill: Counter[Worker] = Counter()

    def of(self, workers: Collection[Worker], blocks: Collection[int]) -> dict[Worker, Load]:
        """Return the load of each worker, with the blocks that it would have with a request of these."""
        distinct = set(blocks)
        found = {}
        for worker in workers:
            held = self._blocks.get(worker)
            # `distinct - held.keys()` would go through all that is held.
            new = sum(block not in held for block in distinct) if held else len(distinct)
            found[worker] = Load(self._requests[worker], self._prefill[worker], new + len(held or ()))
        return found

    def add(self, request: str, worker: Worker, blocks: Collection[int], prefill_tokens: int) -> None:
        self.free(request, worker)
        if len(self._active) >= MOST_ACTIVE:
            self.free(*next(iter(self._active)))
        self._active[request, worker] = _Active(worker, blocks, prefill_tokens)
        self._requests[worker] += 1
        self._prefill[worker] += prefill_tokens
        if blocks:
            self._blocks.setdefault(worker, Counter()).update(set(blocks))

    def prefilled(self, request: str, worker: Worker) -> None:
        found = self._active.get((request, worker))
        if found is not None:
            self._prefill[worker] -= found.prefill_tokens
            found.prefill_tokens = 0

    def free(self, request: str, worker: Worker) -> None:
        found = self._active.pop((request, worker), None)
        if found is None:
            return
        self._requests[worker] -= 1
        self._prefill[worker] -= found.prefill_tokens
        held = self._blocks.setdefault(worker, Counter())
        for block in set(found.blocks):
            held[block] -= 1
            if not held[block]:
                del held[block]

    def forget(self, worker: Worker) -> None:
        """Remove a worker that is gone, with its requests."""
        for request, where in [key for key in self._active if key[1] == worker]:
            self.free(request, where)
        for table in (self._blocks, self._requests, self._prefill):
            table.pop(worker, None)


class Stay(NamedTuple):
    """The time that a request spent at a worker, in seconds of the frontend's clock."""

    worker: Worker
    frontend: str
    began: float
    prefilled: float
    ended: float
    prefill_tokens: int
    blocks: Sequence[int]


class PastLoad:
    """The requests that have ended, as far as they are kept; `begins` is when the first of them ended."""

    def __init__(self, stays: Sequence[Stay], begins: float) -> None:
        self._stays = stays
        self._begins = begins

    def at(self, workers: Collection[Worker], own: Stay, frontend: str | None) -> dict[Worker, Load]:
        """Return the loads of workers when the stay `own` began, or would have begun there.

        `frontend` is the one that routed, if it knows only its own requests.
        """
        active: dict[Worker, list[Stay]] = {}
        for stay in self._others(own, frontend):
            if stay.began < own.began < stay.ended:
                active.setdefault(stay.worker, []).append(stay)
        found = {}
        for worker in workers:
            stays = active.get(worker, ())
            blocks = set(own.blocks).union(*(stay.blocks for stay in stays))
            tokens = sum(stay.prefill_tokens for stay in stays if own.began < stay.prefilled)
            found[worker] = Load(len(stays), tokens, len(blocks))
        return found

    def is_clear(self, own: Stay, frontend: str | None, seconds: float) -> bool:
        """Return whether nothing began, gave its first token or ended within so many seconds of it."""
        return not any(
            abs(when - own.began) <= seconds
            for stay in self._others(own, frontend)
            for when in (stay.began, stay.prefilled, stay.ended)
        )

    def reaches(self, at: float) -> bool:
        """Return whether no request was dropped that may have been active then."""
        return self._begins < at

    def _others(self, own: Stay, frontend: str | None) -> Iterator[Stay]:
        for stay in self._stays:
            if stay is not own and frontend in (None, stay.frontend):
                yield stay
