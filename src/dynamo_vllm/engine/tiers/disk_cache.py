"""Knows which chunks are on disk, and runs the jobs that move them from and to the host tier.

Every method is called by the scheduler of an engine, whose exceptions end the engine and whose waits delay
every request: none raises, and none touches the disk. Threads do (`disk_threads`, `disk_keeper`), and their
results are taken when the scheduler asks what has finished.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_vllm.engine.tiers.disk_files import file_bytes
from dynamo_vllm.engine.tiers.disk_keeper import (
    DAMAGED,
    FULL,
    SLOW,
    DiskKeeper,
    Failed,
    Order,
    Place,
    Ready,
    kind_of,
    tell_pause,
)
from dynamo_vllm.engine.tiers.disk_threads import LOADING_THREADS, STORING_THREADS, DiskThreads, Part
from dynamo_vllm.engine.tiers.disk_waiting import DiskWaiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from dynamo_vllm.engine.tiers.disk_files import Chunks

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures only loggers below its own in each process

MOST_STORES = 4
"""At most a quarter of the host tier waits for the disk; what waits cannot be replaced there."""
_SPARE_FILES = STORING_THREADS + 1
"""Files that are being written, and the one that proves that the disk works."""
_CLOSING_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """One job at its end."""

    job_id: int
    is_whole: bool
    loaded: Sequence[bytes]
    """What a load brought to the host tier, whether it is whole or not."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks that are on disk now, or no longer."""

    keys: Sequence[bytes]
    is_removed: bool


@dataclass(slots=True)
class _Job:
    parts: list[Part]
    open: list[Part]
    """Those that have not ended."""
    begun: float
    asker: str
    is_whole: bool
    """The parts are all of it: nothing was dropped."""
    loaded_before: int
    """How many chunks had been loaded when it began."""


@dataclass(slots=True)
class Counts:
    """What happened since somebody looked."""

    failures: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    evicted: int = 0


def most_chunks(limit_bytes: int, chunk_bytes: int) -> int:
    """Returns how many chunks a limit has room for. Raises ValueError if it is none."""
    one = file_bytes(chunk_bytes)
    count = limit_bytes // one - _SPARE_FILES
    if count < 1:
        least = (_SPARE_FILES + 1) * one
        raise ValueError(
            f"--kv-offload-disk gives each engine {limit_bytes} bytes, too few for chunks of {chunk_bytes}; "
            f"give at least {least / 1e9:.3g} GB for each"
        )
    return count


class DiskCache:
    """The chunks of one engine on disk, the least recently used first."""

    def __init__(self, place: Place, rows: npt.NDArray[np.uint8], *, tells_changes: bool = False) -> None:
        """`rows` is the memory of the host tier, one row for each of its chunks."""
        self.place, self.counts = place, Counts()
        self._tells_changes, self._changes = tells_changes, list[Change]()
        self._chunks: Chunks | None = None
        """None until the folder is open, and after a reset until the old files are gone."""
        self._index: OrderedDict[bytes, int] = OrderedDict()
        """How many loads are reading each chunk."""
        self._told: set[bytes] = set()
        self._writing: set[bytes] = set()
        self._leaving: set[bytes] = set()
        """Victims whose files may still be there: stored again now, they could be removed."""
        self._most_writing = max(1, rows.shape[0] // MOST_STORES)
        self._waiting = DiskWaiting(rows.shape[0], place.chunk_bytes, place.slow_seconds / 2)
        self._jobs: dict[int, _Job] = {}
        self._finished: list[Finished] = []
        self._loaded = 0
        """By the loads that have ended."""
        self._can_load = self._can_store = False
        self._is_paused = self._has_told_damage = False
        self._generation, self._orders, self._pause, self._works_since = 0, 0, 0.0, -math.inf
        self._threads = DiskThreads(rows)
        self._keeper = DiskKeeper(place, self._threads.busy_seconds)

    # --- what the tier is asked ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        return len(self._index) * file_bytes(self.place.chunk_bytes)

    @property
    def is_paused(self) -> bool:
        """Returns whether something keeps it from loading or from storing."""
        return self._is_paused

    def has(self, key: bytes) -> bool:
        return self._can_load and key in self._index

    def offers(self, key: bytes, asker: str) -> bool:
        """Returns whether a request may wait for a chunk from here."""
        return self.has(key) and self._waiting.admits(key, asker)

    def end_step(self) -> None:
        self._waiting.end_step(job.asker for job in self._jobs.values())

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._index:
                self._index.move_to_end(key)

    def load(self, job_id: int, moves: Sequence[tuple[bytes, int]], asker: str = "") -> None:
        """Begins to read chunks into rows of the host tier, for a request."""
        there = [(key, row) for key, row in moves if self.has(key)]
        for key, _ in there:
            self._index[key] += 1
            self._index.move_to_end(key)
        self._begin(job_id, there, (), asker, is_load=True, is_whole=len(there) == len(moves))

    def store(self, job_id: int, moves: Sequence[tuple[bytes, int]]) -> None:
        """Begins to write rows of the host tier as chunks; what there is no room for is dropped."""
        self.touch(key for key, _ in moves)
        known = (self._index, self._writing, self._leaving)
        new = [(key, row) for key, row in moves if not any(key in keys for keys in known)]
        kept, victims = self._room_for(new) if self._can_store else ([], [])
        self.counts.dropped += len(new) - len(kept)
        self._writing.update(key for key, _ in kept)
        self._begin(job_id, kept, victims, "", is_load=False, is_whole=len(kept) == len(new))

    def finished(self) -> list[Finished]:
        """Returns the jobs that have ended since the last call."""
        self._take_results()
        if self._is_too_slow():
            self._fail(SLOW, f"a load or a file took more than {self.place.slow_seconds:g} s")
        done, self._finished = self._finished, []
        return done

    def reset(self) -> None:
        """Forgets all chunks and has their files removed; every job has ended when it returns.

        The engine may get other weights now. What it stores from here on is not for the next process.
        """
        self._take_results()
        self._give_up(loads=True)
        self._drop(list(self._index))
        self._generation += 1
        self._chunks, self._can_load, self._can_store = None, False, False
        self._settle(0.0, is_told=self._is_paused)

    def changes(self) -> list[Change]:
        done, self._changes = self._changes, []
        return done

    def take_counts(self) -> Counts:
        done, self.counts = self.counts, Counts()
        return done

    def close(self) -> None:
        self._give_up(loads=True)
        self._can_load = self._can_store = False
        self._threads.close(_CLOSING_SECONDS)
        self._keeper.close(_CLOSING_SECONDS)

    # --- jobs ---------------------------------------------------------------------------------------------

    def _begin(
        self,
        job_id: int,
        moves: Sequence[tuple[bytes, int]],
        victims: Sequence[bytes],
        asker: str,
        *,
        is_load: bool,
        is_whole: bool,
    ) -> None:
        """Shares a job out to the threads; without moves it ends at once."""
        if not moves or self._chunks is None:
            self._finished.append(Finished(job_id, is_whole, (), 0.0))
            return
        count = min(LOADING_THREADS if is_load else STORING_THREADS, len(moves))
        parts = [
            Part(job_id, is_load, self._chunks, moves[n::count], victims[n::count]) for n in range(count)
        ]
        self._jobs[job_id] = _Job(parts, [*parts], time.monotonic(), asker, is_whole, self._loaded)
        for part in parts:
            (self._threads.load if is_load else self._threads.store)(part)

    def _room_for(
        self, new: Sequence[tuple[bytes, int]]
    ) -> tuple[Sequence[tuple[bytes, int]], Sequence[bytes]]:
        """Returns what can be stored, and the chunks that go for it; one that is being read stays."""
        new = new[: max(0, self._most_writing - len(self._writing))]
        more = len(self._index) + len(self._writing) + len(new) - self.place.most_chunks
        idle = (key for key, readers in self._index.items() if not readers)
        victims = list(itertools.islice(idle, max(0, more)))
        self._drop(victims)
        self._leaving.update(victims)
        self.counts.evicted += len(victims)
        return new[: len(new) - max(0, more - len(victims))], victims

    def _take_results(self) -> None:
        done, ready = self._threads.done, self._keeper.ready
        while not done.empty():  # nobody else takes from them
            self._take_part(done.get_nowait())
        while not ready.empty():
            self._take_ready(ready.get_nowait())

    def _take_part(self, part: Part) -> None:
        if part.is_given_up:  # its job has ended long ago
            return
        if part.is_load:
            self._take_loaded(part)
        else:
            self._writing.difference_update(key for key, _ in part.moves)
            self._leaving.difference_update(part.victims)
            self._index.update(dict.fromkeys(part.moved, 0))
            self._tell(part.moved)
        job = self._jobs[part.job_id]
        job.open.remove(part)
        if not job.open:
            self._end(part.job_id)
        if part.error is not None:
            self._fail(kind_of(part.error), part.error)

    def _take_loaded(self, part: Part) -> None:
        self._stop_reading(part)
        self._tell([key for key in part.moved if key in self._index])
        if part.moved:
            self._keeper.touch(part.chunks, part.moved)
        if part.lost:
            self._take_lost(part)

    def _take_lost(self, part: Part) -> None:
        self._drop([key for key, _ in part.lost])
        self.counts.failures[DAMAGED] += len(part.lost)
        if not self._has_told_damage:
            self._has_told_damage = True
            key, why = part.lost[0]
            logger.warning(
                "KV caches on disk: %s is useless: %s; its prompt is computed, and more such files are only "
                "counted",
                part.chunks.path(key),
                why,
            )

    def _stop_reading(self, part: Part) -> None:
        for key, _ in part.moves:
            if self._index.get(key):  # not if it was lost and stored again meanwhile
                self._index[key] -= 1

    def _end(self, job_id: int) -> None:
        job = self._jobs.pop(job_id)
        moved = [key for part in job.parts for key in part.moved]
        is_whole = job.is_whole and len(moved) == sum(len(part.moves) for part in job.parts)
        loaded = moved if job.parts[0].is_load else ()
        self._loaded += len(loaded)
        if is_whole and loaded:
            seconds, by_all = max(part.seconds for part in job.parts), len(job.parts) == LOADING_THREADS
            self._waiting.learn(len(loaded), seconds, by_all=by_all)
        self._finished.append(Finished(job_id, is_whole, loaded, time.monotonic() - job.begun))

    def _give_up(self, *, loads: bool) -> None:
        """Ends all jobs, or all but the loads. No thread touches the host tier for them any more."""
        for job_id, job in list(self._jobs.items()):
            if job.parts[0].is_load and not loads:
                continue
            for part in job.open:
                part.give_up()
                if part.is_load:
                    self._stop_reading(part)
            self._end(job_id)
        self._threads.forget_waiting(loads=loads)
        self._writing.clear()
        self._leaving.clear()

    # --- failures -----------------------------------------------------------------------------------------

    def _is_too_slow(self) -> bool:
        most = self.place.slow_seconds
        loads = [job for job in self._jobs.values() if job.parts[0].is_load]
        if loads and (waits := time.monotonic() - loads[0].begun) > most:
            moved = sum(len(part.moved) for job in loads for part in job.parts)
            self._waiting.learn_slow(self._loaded - loads[0].loaded_before + moved, waits)
            return True
        return bool(self._jobs) and self._threads.busy_seconds() > most

    def _fail(self, kind: str, what: object) -> None:
        """Pauses the tier: only stores if the disk is full, otherwise loads too."""
        self.counts.failures[kind] += 1
        is_full = kind == FULL
        if not (self._can_store if is_full else self._can_load):
            return
        self._give_up(loads=not is_full)
        self._can_store, self._can_load = False, self._can_load and is_full
        self._is_paused = True
        # One that fails soon after a pause gets a longer one.
        is_again = time.monotonic() - self._works_since < 2 * self._pause
        self._pause = min(
            max(self._pause * 2, self.place.first_pause) if is_again else self.place.first_pause,
            self.place.longest_pause,
        )
        tell_pause(self.place.root, kind, what, self._pause)
        self._settle(self._pause, is_told=True)

    def _settle(self, pause: float, *, is_told: bool) -> None:
        self._orders += 1
        self._keeper.settle(Order(self._orders, self._generation, pause, is_told))

    def _take_ready(self, ready: Ready | Failed) -> None:
        if ready.number != self._orders:  # a reset or a failure came between, which has an order of its own
            return
        if isinstance(ready, Failed):
            self.counts.failures[ready.kind] += 1
            self._is_paused = True
            return
        if not self._can_load:
            self._drop(list(self._index.keys() - set(ready.keys)))
            self._index = OrderedDict.fromkeys(ready.keys, 0)
            self._chunks, self._can_load = ready.chunks, True
        for key in reversed(ready.keys):  # victims of stores that a full disk ended
            if key not in self._index:
                self._index[key] = 0
                self._index.move_to_end(key, last=False)
        self._can_store, self._is_paused = not ready.is_full, ready.is_full
        self._pause = max(self._pause, ready.pause)
        self._works_since = time.monotonic()

    # --- what the router is told --------------------------------------------------------------------------

    def _tell(self, keys: Sequence[bytes]) -> None:
        """Chunks of an earlier process are told when they are first loaded: then vLLM knows their tokens."""
        new = [key for key in keys if key not in self._told] if self._tells_changes else []
        if new:
            self._told.update(new)
            self._changes.append(Change(new, is_removed=False))

    def _drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._index.pop(key, None)
        gone = [key for key in keys if key in self._told]
        if gone:
            self._told.difference_update(gone)
            self._changes.append(Change(gone, is_removed=True))
