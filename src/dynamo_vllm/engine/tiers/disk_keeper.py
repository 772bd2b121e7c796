"""Opens the disk tier's folder, and tries again after failures, in a thread of its own."""

from __future__ import annotations

import errno
import logging
import math
import queue
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dynamo_vllm.engine.tiers import disk_files
from dynamo_vllm.engine.tiers.disk_files import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dynamo_vllm.engine.tiers.disk_files import Chunks

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures only loggers below its own in each process

FULL, SLOW, DAMAGED, ERROR = "full", "slow", "damaged", "error"
"""Why the disk failed."""
_REMEDIES = {
    FULL: "free some space there, or give --kv-offload-disk fewer GB",
    SLOW: "check the disk, or give --kv-offload-disk another one",
    ERROR: "check that the disk is there and that this user may write",
}
STRAY_SECONDS = 900.0
"""A slot that nobody has for this time has no worker any more. One that starts again needs some minutes, and
workers of other models, or with other flags, have theirs in the same folder."""


def kind_of(exc: Exception) -> str:
    if isinstance(exc, TimeoutError):
        return SLOW
    return FULL if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT) else ERROR


def tell_pause(path: Path, kind: str, what: object, seconds: float) -> None:
    meanwhile = "nothing more is stored" if kind == FULL else "prompts are computed"
    logger.warning(
        "KV caches on disk in %s: %s: %s; %s until it works, next try in %.0f s; %s",
        path,
        "the disk is full" if kind == FULL else "it failed",
        what,
        meanwhile,
        seconds,
        _REMEDIES[kind],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the tier has its files, and how much of it."""

    root: Path
    fingerprint: str
    chunk_bytes: int
    most_chunks: int
    first_pause: float = 10.0
    longest_pause: float = 600.0
    slow_seconds: float = 5.0
    """A load that takes longer is given up: most prompts are computed in that time."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the scheduler asks for: the folder of a generation, ready for use."""

    number: int = 0
    generation: int = 0
    pause: float = 0.0
    """How long to wait before the first try."""
    is_told: bool = False
    """The log says that the tier is paused."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Tells the scheduler that an order is done."""

    number: int
    chunks: Chunks
    keys: Sequence[bytes]
    """What is there, the least recently used first."""
    pause: float
    """How long the last wait was."""
    is_full: bool
    """Nothing can be stored yet; another message follows when it can."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Tells the scheduler that an order takes longer."""

    number: int
    kind: str


class DiskKeeper:
    """Has the slot, and puts a message into `ready` when it can be used."""

    def __init__(self, place: Place, busy_seconds: Callable[[], float]) -> None:
        self.ready: queue.SimpleQueue[Ready | Failed] = queue.SimpleQueue()
        self._place, self._busy_seconds = place, busy_seconds
        self._inbox: queue.SimpleQueue[Order | tuple[Chunks, Sequence[bytes]] | None] = queue.SimpleQueue()
        self._slot: Slot | None = None
        self._unowned: set[tuple[Path, int]] = set()
        """Slots without a worker, and when each was last taken, at the last look."""
        self._look_at = math.inf
        self._inbox.put(Order())
        self._thread = threading.Thread(target=self._run, name="kv-disk-keeper", daemon=True)
        self._thread.start()

    def settle(self, order: Order) -> None:
        """Replaces an order that is not done yet."""
        self._inbox.put(order)

    def touch(self, chunks: Chunks, keys: Sequence[bytes]) -> None:
        self._inbox.put((chunks, keys))

    def close(self, seconds: float) -> None:
        """Unlocks the slot, unless the disk hangs; then the end of the process does."""
        self._inbox.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        order: Order | None = None
        due = math.inf
        while True:
            try:
                until = min(due, self._look_at)
                wait = None if until == math.inf else max(0.0, until - time.monotonic())
                asked = self._inbox.get(timeout=wait)
            except queue.Empty:
                if time.monotonic() >= self._look_at:
                    if self._remove_strays() and order is not None:
                        due = time.monotonic()  # there is more room now
                elif order is not None:
                    order = self._tried(order)
                    due = time.monotonic() + order.pause if order is not None else math.inf
                continue
            if asked is None:
                break
            if isinstance(asked, Order):
                order, due = asked, time.monotonic() + asked.pause
            else:
                chunks, keys = asked
                chunks.touch(keys)
        if self._slot is not None:
            self._slot.close()

    def _tried(self, order: Order) -> Order | None:
        """Carries out an order; returns what to try next, None if all is done."""
        place = self._place
        try:
            done = self._settled(order)
        except Exception as exc:  # whatever it is, the engine can do without the tier
            return self._again(order, kind_of(exc), exc)
        self.ready.put(done)
        if done.is_full:
            return self._again(order, FULL, "there is no space for one chunk")
        if order.is_told:
            logger.info("KV caches on disk in %s: it works again, with %d chunks", place.root, len(done.keys))
        return None

    def _again(self, order: Order, kind: str, what: object) -> Order:
        place = self._place
        pause = min(max(order.pause * 2, place.first_pause), place.longest_pause)
        if not order.is_told:
            tell_pause(place.root, kind, what, pause)
            self.ready.put(Failed(order.number, kind))
        return replace(order, pause=pause, is_told=True)

    def _settled(self, order: Order) -> Ready:
        place, slot = self._place, self._slot
        if self._busy_seconds() > place.slow_seconds:
            raise TimeoutError(f"a file has not been read or written for {self._busy_seconds():.0f} s")
        if slot is None or not slot.is_ours():
            slot = self._take()
        chunks = slot.tidy(order.generation)
        keys = chunks.scan()
        spare = max(0, len(keys) - place.most_chunks)
        for key in keys[:spare]:
            chunks.remove(key)
        is_full = False
        try:
            seconds = slot.prove()
        except OSError as exc:
            if kind_of(exc) != FULL:
                raise
            is_full = True
        else:
            if seconds > place.slow_seconds:
                raise TimeoutError(f"a file of {place.chunk_bytes} bytes took {seconds:.0f} s")
        return Ready(order.number, chunks, keys[spare:], order.pause, is_full)

    def _take(self) -> Slot:
        place = self._place
        if self._slot is not None:
            self._slot.close()
            self._slot = None
        if self._look_at == math.inf:
            self._remove_strays()  # before: what they leave may be in the way
        slot = self._slot = Slot.take(place.root, place.fingerprint, place.chunk_bytes)
        return slot

    def _remove_strays(self) -> int:
        """Removes slots that no worker has had since the last look, and looks again later."""
        self._look_at = time.monotonic() + STRAY_SECONDS
        place, before = self._place, self._unowned
        self._unowned = set()
        try:
            now = disk_files.unowned(place.root)
            count = sum(disk_files.remove_unowned(slot) for slot, _ in now & before)
        except OSError:
            return 0  # the next use of the disk tells
        self._unowned = now
        if count:
            logger.info("KV caches on disk in %s: removed the files of %d lost engines", place.root, count)
        return count
