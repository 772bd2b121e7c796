"""Reads from snapshots what workers have cached, where events were lost or never came.

While a worker is read its further events wait: they may be of before or after the snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from dynamo_vllm.console.decisions import messages
from dynamo_vllm.console.decisions.shapes import Worker
from dynamo_vllm.errors import DynamoVllmError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from dynamo_vllm.console.decisions.block_map import BlockMap
    from dynamo_vllm.console.decisions.messages import WorkerEvent
    from dynamo_vllm.serving.watch.discovery import Member

    Take = Callable[[Mapping[str, int]], Awaitable[list[bytes]]]

logger = logging.getLogger(__name__)
SNAPSHOT_SECONDS = 5.0
"""The least time between two snapshots; it doubles up to LONGEST_SECONDS while they are needed."""
LONGEST_SECONDS = 300.0
SLICE_BLOCKS = 2000
"""Blocks until others on the loop have their turn."""
MOST_HELD = 100_000
"""Events that wait while a snapshot is taken."""


class Snapshots:
    """`take` returns what workers have cached, by address (component) with the size of their blocks."""

    def __init__(self, blocks: BlockMap, take: Take, member: Callable[[int], Member | None]) -> None:
        self.wanted: set[Worker] = set()
        self.being_read: set[Worker] = set()
        """Those of the wanted ones that are read now."""
        self.held: list[tuple[Worker, WorkerEvent, float]] = []
        """What these have said meanwhile."""
        self.why_not: str | None = None
        """Why the last one could not be taken."""
        self._blocks = blocks
        self._take = take
        self._member = member
        self._next = 0.0
        self._wait_seconds = SNAPSHOT_SECONDS

    def ask(self, worker: Worker) -> None:
        """Have a worker read; one that is being read is read again, as its snapshot may be of before."""
        self.wanted.add(worker)
        self.being_read.discard(worker)

    def keep(self, instances: Collection[int]) -> None:
        """Forget all others."""
        self.wanted = {worker for worker in self.wanted if worker.instance in instances}
        self.being_read &= self.wanted

    def holds(self, worker: Worker, event: WorkerEvent, at: float) -> bool:
        """Return whether an event waits until its worker was read."""
        if worker not in self.being_read:
            return False
        self.held.append((worker, event, at))
        if len(self.held) > MOST_HELD:
            logger.info("the caches change too fast to be read; it is tried again later")
            self.being_read.clear()
            self.held.clear()
        return True

    async def refresh(self) -> None:
        """Take a snapshot of the workers that are wanted."""
        sizes = self._block_sizes()
        if not sizes:
            self._wait_seconds = max(SNAPSHOT_SECONDS, self._wait_seconds * 0.99)
            return
        if time.monotonic() < self._next:
            return
        self.being_read = {worker for worker in self.wanted if self._component(worker) in sizes}
        try:
            await self._load(await self._take(sizes))
            self.why_not = None
        except DynamoVllmError as exc:
            if self.why_not is None:
                logger.warning("routing decisions: %s", exc)
            self.why_not = str(exc)
        finally:
            self.being_read.clear()
            self.held.clear()
            self._next = time.monotonic() + self._wait_seconds
            self._wait_seconds = min(LONGEST_SECONDS, 2 * self._wait_seconds)

    def _block_sizes(self) -> dict[str, int]:
        """Return the components of the workers to be read, with the size of their blocks."""
        found: dict[str, int] = {}
        for worker in self.wanted:
            member = self._member(worker.instance)
            if member is not None and member.block_size:
                found[member.component] = member.block_size
        return found

    def _component(self, worker: Worker) -> str | None:
        member = self._member(worker.instance)
        return None if member is None else member.component

    async def _load(self, dumps: Sequence[bytes]) -> None:
        by_worker: dict[Worker, list[WorkerEvent]] = {worker: [] for worker in self.being_read}
        for dump in dumps:
            for event in messages.snapshot_events(dump):
                worker = Worker(event.worker_id, event.event.dp_rank)
                if worker in by_worker:
                    by_worker[worker].append(event)
        for worker, events in by_worker.items():
            if worker in self.being_read:
                self._blocks.clear(worker, None)
            while events and worker in self.being_read:
                events, before = await self._load_some(worker, events), len(events)
                if len(events) == before:
                    break
        read = self.being_read
        for worker, event, at in self.held:
            if worker in read:
                apply(self._blocks, worker, event, at)
        now = time.time()
        for worker in read:
            self._blocks.begin(worker, now)
        self.wanted -= read
        logger.info("read the caches of %d workers: %d blocks", len(read), self._blocks.count)

    async def _load_some(self, worker: Worker, events: Sequence[WorkerEvent]) -> list[WorkerEvent]:
        """Return the events whose predecessor is not known yet."""
        left = []
        blocks = 0
        for event in events:
            if not apply(self._blocks, worker, event, None):
                left.append(event)
            data = event.event.data
            blocks += len(data.stored.blocks) if not isinstance(data, str) and data.stored else 1
            if blocks > SLICE_BLOCKS:
                blocks = 0
                await asyncio.sleep(0)
                if worker not in self.being_read:
                    break  # it has left, or lost messages
        return left


def apply(blocks: BlockMap, worker: Worker, event: WorkerEvent, at: float | None) -> bool:
    """Change the map; return False if the event continues a block that is not known."""
    tier = messages.TIER_NAMES.get(event.storage_tier)
    data = event.event.data
    if isinstance(data, str):
        blocks.clear(worker, at)
    elif tier is not None and data.stored is not None:
        return blocks.store(worker, tier, data.stored, at)
    elif tier is not None and data.removed is not None and at is not None:
        blocks.remove(worker, tier, data.removed.block_hashes, at)
    return True
