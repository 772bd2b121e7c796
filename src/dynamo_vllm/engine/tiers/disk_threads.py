"""Runs the reads and writes of the disk tier in threads that may hang with the disk.

A thread has a buffer of its own for one chunk and touches the host tier only to copy that buffer, under a
lock and only if its part of the job has not been given up. So the scheduler can give up a job at any moment,
and the host tier can use the memory again, whatever the disk does.
"""

from __future__ import annotations

import contextlib
import errno
import math
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dynamo_vllm.engine.tiers.disk_files import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from dynamo_vllm.engine.tiers.disk_files import Chunks

LOADING_THREADS = 4
"""Loads have threads of their own: a prompt waits for them."""
STORING_THREADS = 2
_BAD_FILE = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ELOOP)
"""Errors of one file that would come again with it."""


@dataclass(slots=True, eq=False)
class Part:
    """The share of one job that one thread does."""

    job_id: int
    is_load: bool
    chunks: Chunks
    moves: Sequence[tuple[bytes, int]]
    """The key of a chunk and its row in the host tier."""
    victims: Sequence[bytes] = ()
    """Chunks to remove before the others are stored."""
    moved: list[bytes] = field(default_factory=list)
    lost: list[tuple[bytes, str]] = field(default_factory=list)
    """Chunks whose file is gone or damaged, and why."""
    error: Exception | None = None
    seconds: float = 0.0
    """How long its thread took."""
    is_given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def give_up(self) -> None:
        """From now on no thread touches the host tier for it; waits at most for the copy of one chunk."""
        with self.lock:
            self.is_given_up = True

    def is_wanted(self) -> bool:
        return not self.is_given_up


class DiskThreads:
    """Threads that take parts of jobs from two queues, one for loads and one for stores."""

    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        """`rows` is the memory of the host tier, one row for each of its chunks."""
        self.done: queue.SimpleQueue[Part] = queue.SimpleQueue()
        self._rows: npt.NDArray[np.uint8] | None = rows
        self._row_bytes = rows.shape[1]
        self._loads: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        queues = [self._loads] * LOADING_THREADS + [self._stores] * STORING_THREADS
        self._busy_since = [math.inf] * len(queues)
        self._threads = [self._started(number, waiting) for number, waiting in enumerate(queues)]

    def load(self, part: Part) -> None:
        self._loads.put(part)

    def store(self, part: Part) -> None:
        self._stores.put(part)

    def forget_waiting(self, *, loads: bool) -> None:
        """Empties the queue of stores, and that of loads; all of them have been given up."""
        for waiting in (self._stores, self._loads) if loads else (self._stores,):
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()

    def busy_seconds(self) -> float:
        """Returns for how long the slowest thread has been reading or writing its chunk."""
        return time.monotonic() - min(time.monotonic(), *self._busy_since)

    def close(self, seconds: float) -> None:
        """Ends the threads; those that hang are left behind, and touch nothing any more."""
        self.forget_waiting(loads=True)
        for waiting, count in ((self._loads, LOADING_THREADS), (self._stores, STORING_THREADS)):
            for _ in range(count):
                waiting.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._rows = None  # vLLM unmaps the memory

    def _started(self, number: int, waiting: queue.SimpleQueue[Part | None]) -> threading.Thread:
        # Daemons: a thread that hangs must not keep the process from ending.
        thread = threading.Thread(
            target=self._run, args=(number, waiting), name=f"kv-disk-{number}", daemon=True
        )
        thread.start()
        return thread

    def _run(self, number: int, waiting: queue.SimpleQueue[Part | None]) -> None:
        buffer = np.empty(self._row_bytes, np.uint8)
        while (part := waiting.get()) is not None:
            begun = time.monotonic()
            steps = self._load(part, buffer) if part.is_load else self._store(part, buffer)
            try:
                for _ in steps:
                    self._busy_since[number] = time.monotonic()
            except Exception as exc:  # a thread must not end, and a job must not be lost
                part.error = exc
            self._busy_since[number], part.seconds = math.inf, time.monotonic() - begun
            self.done.put(part)

    def _load(self, part: Part, buffer: npt.NDArray[np.uint8]) -> Iterator[None]:
        """Yields before each chunk."""
        for key, row in part.moves:
            yield
            if part.is_given_up:
                return
            try:
                part.chunks.read(key, buffer.data)
            except FileNotFoundError:
                if not part.chunks.is_there():
                    raise
                part.lost.append((key, "it is gone"))
                continue
            except Damaged as exc:
                part.lost.append((key, str(exc)))
                part.chunks.remove(key)
                continue
            except OSError as exc:
                if exc.errno in _BAD_FILE:
                    part.chunks.remove(key)
                raise
            with part.lock:
                if part.is_given_up or self._rows is None:
                    return
                np.copyto(self._rows[row], buffer)  # numpy lets other threads run meanwhile
                part.moved.append(key)

    def _store(self, part: Part, buffer: npt.NDArray[np.uint8]) -> Iterator[None]:
        """Yields before each chunk."""
        for victim in part.victims:
            yield
            if part.is_given_up:
                return
            part.chunks.remove(victim)
        for key, row in part.moves:
            yield
            with part.lock:
                if part.is_given_up or self._rows is None:
                    return
                np.copyto(buffer, self._rows[row])
            if part.chunks.write(key, buffer.data, part.is_wanted):
                part.moved.append(key)
