"""Keeps which worker has which block in which tier, and for some minutes what it had before.

A block is known by its sequence hash, which stands for all tokens up to its end. For each the map has a
number with three bits per worker, one for each tier: a prompt is then compared with all workers at once.
Hashes of a guessed prompt can be computed by anyone, so they never leave this module's callers.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dynamo_vllm.console.decisions.change_log import KEEP_SECONDS, MOST_CHANGES, NEVER, ChangeLog
from dynamo_vllm.console.decisions.shapes import Overlap, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dynamo_vllm.console.decisions.messages import Stored

TIERS = 3
MOST_BLOCKS = 400_000
"""Blocks of all workers together; each takes about 300 bytes."""
FORGOTTEN_SHARE = 16
"""The part of the blocks that is forgotten at once, when there are too many."""


class Use(NamedTuple):
    """How many requests ended their known blocks at a block, and when the last did."""

    times: int
    last: float


class _Left(NamedTuple):
    """A worker that is gone; its bits are still in the log of changes."""

    at: float
    worker: Worker
    slot: int
    since: float


class BlockMap:
    """`chain` returns the sequence hash of a block from that of the block before it and its own hash."""

    def __init__(
        self,
        chain: Callable[[int, int], int],
        most_blocks: int = MOST_BLOCKS,
        most_changes: int = MOST_CHANGES,
    ) -> None:
        self._chain = chain
        self._most_blocks = most_blocks
        self._masks: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        """The block before each block; 0 for the first of a prompt."""
        self._uses: dict[int, Use] = {}
        self._known: dict[Worker, dict[int, int]] = {}
        """For each worker the sequence hash of each hash of its engine, which removals name."""
        self._count = 0
        self._slots: dict[Worker, int] = {}
        self._left: deque[_Left] = deque()
        self._log = ChangeLog(most_changes)
        self._since: dict[Worker, float] = {}
        self._forgotten_at = -NEVER

    @property
    def workers(self) -> list[Worker]:
        return list(self._slots)

    @property
    def worker_count(self) -> int:
        return len(self._slots)

    @property
    def count(self) -> int:
        """Return the number of blocks over all workers."""
        return self._count

    # --- what workers tell

    def store(self, worker: Worker, tier: int, stored: Stored, at: float | None) -> bool:
        """Return whether the block before them is known; without a time the change is not logged."""
        known = self._of(worker)
        last = 0
        if stored.parent_hash is not None:
            found = known.get(stored.parent_hash)
            if found is None:
                return False  # the router leaves such blocks out too: it cannot tell what is before them
            last = found
        bit = 1 << (TIERS * self._slots[worker] + tier)
        masks, count = self._masks, len(known)
        for block in stored.blocks:
            here = self._chain(last, block.tokens_hash) if last else block.tokens_hash
            known[block.block_hash] = here
            mask = masks.get(here, 0)
            if not mask & bit:
                masks[here] = mask | bit
                self._parents[here] = last
                if at is not None:
                    self._log.add(here, mask, at)
            last = here
        self._count += len(known) - count
        if self._count > self._most_blocks:
            self._forget_oldest(time.time() if at is None else at)
        return True

    def remove(self, worker: Worker, tier: int, hashes: Iterable[int], at: float) -> None:
        known = self._of(worker)
        shift = TIERS * self._slots[worker]
        bit = 1 << (shift + tier)
        masks, count = self._masks, len(known)
        for name in hashes:
            here = known.get(name)
            if here is None:
                continue
            mask = masks.get(here, 0)
            if mask & bit:
                self._take_away(here, mask, bit, at)
                mask ^= bit
            if not mask >> shift & 7:
                del known[name]
        self._count += len(known) - count

    def clear(self, worker: Worker, at: float | None) -> None:
        known = self._of(worker)
        bits = 7 << (TIERS * self._slots[worker])
        for here in known.values():
            mask = self._masks.get(here, 0)
            if mask & bits:
                self._take_away(here, mask, bits, at)
        self._count -= len(known)
        known.clear()

    def begin(self, worker: Worker, at: float) -> None:
        """Note that everything about this worker is known from now on."""
        self._of(worker)
        self._since[worker] = at

    def doubt(self, worker: Worker) -> None:
        """Note that messages of this worker were lost, until `begin`."""
        self._of(worker)
        self._since[worker] = NEVER

    def forget(self, worker: Worker, at: float) -> None:
        """Remove a worker that is gone."""
        if worker not in self._slots:
            return
        self.clear(worker, at)
        self._left.append(_Left(at, worker, self._slots.pop(worker), self._since.pop(worker)))
        self._log.latest = max(self._log.latest, at)
        del self._known[worker]

    # --- what others ask

    def overlaps(self, hashes: Sequence[int], at: float | None = None) -> dict[Worker, Overlap]:
        """Return what each worker has, or had at a time, of a prompt with these hashes; others have none."""
        ends = self._ends(hashes, at)
        by_slot = {slot: worker for worker, slot in self._slots.items()}
        if at is not None:
            by_slot |= {left.slot: left.worker for left in self._left if left.at > at}
        return {
            by_slot[slot]: Overlap(device, host - device, disk - host)
            for slot, (device, host, disk) in ends.items()
            if slot in by_slot and disk
        }

    def is_known(self, worker: Worker, at: float) -> bool:
        """Return whether `overlaps` at that time is the whole truth about a worker."""
        begun = self._since.get(worker, NEVER)
        if worker not in self._slots:
            begun = next((left.since for left in self._left if left.worker == worker and left.at > at), NEVER)
        return begun <= at and self._log.begins <= at and self._forgotten_at < begun

    def changes_between(self, hashes: Sequence[int], begin: float, end: float) -> list[float]:
        """Return when anything about these blocks changed, within this time."""
        return self._log.times(hashes, begin, end)

    def use(self, hashes: Sequence[int], at: float, times: int = 1) -> None:
        """Count requests, one of which has a prompt that begins with these blocks."""
        last = 0
        for here in hashes:
            if here not in self._masks:
                break
            last = here
        if last:
            self._add_use(last, Use(times, at))

    def tables(self) -> tuple[dict[int, int], dict[int, int], dict[int, Use], dict[int, Worker]]:
        """Return copies for the prefix tree: bits, blocks before, uses, and the workers of the bits."""
        by_slot = {slot: worker for worker, slot in self._slots.items()}
        return dict(self._masks), dict(self._parents), dict(self._uses), by_slot

    def totals(self) -> dict[Worker, Overlap]:
        """Return how many blocks each worker has in each tier; takes about 50 ns per block."""
        counts: dict[int, int] = {}
        for mask in self._masks.values():
            counts[mask] = counts.get(mask, 0) + 1
        tiers = tiers_of(counts)
        return {w: Overlap(*tiers.get(slot, (0,) * TIERS)) for w, slot in self._slots.items()}

    # --- below

    def _of(self, worker: Worker) -> dict[int, int]:
        known = self._known.get(worker)
        if known is None:
            known = self._known[worker] = {}
            self._slots[worker] = self._free_slot()
            self._since[worker] = NEVER
        return known

    def _free_slot(self) -> int:
        if self._left and self._left[0].at < self._log.latest - 2 * KEEP_SECONDS:
            return self._left.popleft().slot
        return len(self._slots) + len(self._left)

    def _take_away(self, here: int, mask: int, bits: int, at: float | None) -> None:
        """Take bits from those of a block; when none are left, whoever used it used the one before it."""
        after = mask & ~bits
        if after:
            self._masks[here] = after
        else:
            del self._masks[here]
            parent = self._parents.pop(here, 0)
            use = self._uses.pop(here, None)
            if use is not None and parent in self._masks:
                self._add_use(parent, use)
        if at is not None:
            self._log.add(here, mask, at)

    def _add_use(self, here: int, more: Use) -> None:
        times, last = self._uses.get(here, (0, 0.0))
        self._uses[here] = Use(times + more.times, max(last, more.last))

    def _forget_oldest(self, at: float) -> None:
        """Forget blocks of the worker with the most; nothing about it is sure until it is read again."""
        worker, known = max(self._known.items(), key=lambda one: len(one[1]))
        bits = 7 << (TIERS * self._slots[worker])
        for name in list(islice(known, max(1, len(known) // FORGOTTEN_SHARE))):
            here = known.pop(name)
            self._count -= 1
            mask = self._masks.get(here, 0)
            if mask & bits:
                self._take_away(here, mask, bits, at)
        self._forgotten_at = at

    def _ends(self, hashes: Sequence[int], at: float | None) -> dict[int, list[int]]:
        """Return for each worker's bits where its run ends in each tier.

        A worker begins in the device tier. Where its run ends there it goes on in host memory from the same
        block, then on disk. The three numbers have the bits of the workers that are in each tier now.
        """
        ends: dict[int, list[int]] = {}
        every = device = self._every_bit()
        host = disk = 0
        number = 0
        for number, mask in enumerate(self._masks_at(hashes, at)):
            left = device & ~mask
            if not (left or host or disk):
                continue
            device &= mask
            host |= left
            left_host = host & ~(mask >> 1)
            host &= mask >> 1
            disk |= left_host
            left_disk = disk & ~(mask >> 2)
            disk &= mask >> 2
            for tier, bits in enumerate((left, left_host, left_disk)):
                if bits:
                    _note(ends, bits & every, tier, number)
            if not (device or host or disk):
                return ends
        number = len(hashes)
        _note(ends, device, 0, number)
        _note(ends, device | host, 1, number)
        _note(ends, device | host | disk, 2, number)
        return ends

    def _every_bit(self) -> int:
        found = 0
        for slot in (*self._slots.values(), *(left.slot for left in self._left)):
            found |= 1 << (TIERS * slot)
        return found

    def _masks_at(self, hashes: Sequence[int], at: float | None) -> Iterable[int]:
        if at is None:
            return [self._masks.get(here, 0) for here in hashes]
        return self._log.states(hashes, at, self._masks)


def tiers_of(counts: Mapping[int, int]) -> dict[int, list[int]]:
    """Return how many blocks are in each tier by worker, from how many blocks have the same bits."""
    found: dict[int, list[int]] = {}
    for mask, count in counts.items():
        while mask:
            lowest = mask & -mask
            slot, tier = divmod(lowest.bit_length() - 1, TIERS)
            found.setdefault(slot, [0] * TIERS)[tier] += count
            mask ^= lowest
    return found


def _note(ends: dict[int, list[int]], bits: int, tier: int, number: int) -> None:
    while bits and number:
        lowest = bits & -bits
        ends.setdefault(lowest.bit_length() // TIERS, [0] * TIERS)[tier] = number
        bits ^= lowest
