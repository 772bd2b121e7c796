"""Tracks the jobs in flight, and aborts them when a client disconnects or the worker must stop.

The runtime has a future per request that reports a disconnect. For it the runtime's thread waits three times
for Python's lock, of seven times per request. So one timer asks all requests in flight instead. A stream that
is being sent also learns of a disconnect from its sender.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dynamo_vllm.errors import Asleep, Draining

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from dynamo_vllm.engine.base import Engine

LEAVING = "this worker is leaving"
LOOK_SECONDS = 0.05
"""How often the requests are asked whether their clients are still there."""
HOLD_SECONDS = 5.0
"""How long a request may compute its prompt before the router's queue no longer counts it."""
T = TypeVar("T")


class Cancellable(Protocol):
    """The part of the runtime's context that we use."""

    def id(self) -> str: ...

    def is_stopped(self) -> bool: ...

    def is_killed(self) -> bool: ...


class InFlight:
    """Knows every running job and aborts it in the engine; no task per request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tell_router: Callable[[Any, int], None] = lambda context, rank: None
        """Tells the router that a request computes nothing on its rank, so that no other waits for it."""
        self._jobs: dict[str, Watch] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._count = 0
        self.total = 0
        """Jobs since the start."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed: str | None = None
        self.last_change = time.monotonic()

    def __len__(self) -> int:
        return len(self._jobs)

    def watch(self, context: Cancellable) -> Watch:
        return Watch(self, context)

    def enter(self, wanted: str, watch: Watch) -> str:
        """Return the id of a new job: `wanted`, or a variant if it is taken (vLLM would abort both)."""
        if self._closed is not None:
            raise Asleep(self._closed)
        job_id = wanted
        while job_id in self._jobs:
            self._count += 1
            job_id = f"{wanted}#{self._count}"
        self._jobs[job_id] = watch
        self.total += 1
        self.last_change = time.monotonic()
        self._look_later()
        return job_id

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """End the jobs whose clients are gone; let none keep others in the router's queue for long."""
        self._timer, now = None, time.monotonic()
        if self._jobs:
            self._look_later()
        for watch in self._jobs.values():
            if watch.is_stopped():
                watch.left()
            elif watch.is_counted and now >= watch.counts_until:
                watch.is_counted = False
                self.tell_router(watch.context, watch.rank)

    def abort(self, job_id: str) -> None:
        """Abort a job in the engine; safe to call from a callback."""
        task = asyncio.get_running_loop().create_task(self._engine.abort(job_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def abort_all(self) -> None:
        """Move every job to another worker."""
        for watch in self._jobs.values():
            watch.move()

    def close(self, reason: str) -> None:
        """Accept no further job: the engine would not compute it."""
        self._closed = reason

    def open(self) -> None:
        self._closed = None

    def leave(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        self.last_change = time.monotonic()


class Watch:
    """While open, abort the job when its client disconnects or the worker must stop."""

    __slots__ = (
        "_in_flight",
        "_waiting",
        "_wanted",
        "client_left",
        "context",
        "counts_until",
        "is_counted",
        "is_over",
        "job_id",
        "must_move",
        "rank",
    )

    def __init__(self, in_flight: InFlight, context: Cancellable) -> None:
        self._in_flight = in_flight
        self.context = context
        self._wanted = self.job_id = context.id()
        self.client_left = False
        self.must_move = False
        self.is_over = False
        """One of the two."""
        self.is_counted = True
        """Whether the router takes it for one whose prompt is being computed: until its first token."""
        self.counts_until = 0.0
        """It may wait for media, for example, until `computes` is called."""
        self.rank = 0
        """The data-parallel rank that the router chose."""
        self._waiting: asyncio.Timeout | None = None

    def __enter__(self) -> Watch:
        self.job_id = self._in_flight.enter(self._wanted, self)
        return self

    def computes(self) -> None:
        """The engine gets the job now."""
        self.counts_until = time.monotonic() + HOLD_SECONDS

    def is_stopped(self) -> bool:
        return self.context.is_stopped() or self.context.is_killed()

    def left(self) -> None:
        """The client is gone: stop the engine's work."""
        if not self.client_left:
            self.client_left = True
            self._end()

    def move(self) -> None:
        """Another worker will serve it; a job that the engine does not know yet must not start."""
        self.must_move = True
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._in_flight.abort(self.job_id)
        waiting, self._waiting = self._waiting, None  # one that has finished cannot be stopped again
        if waiting is not None:
            waiting.reschedule(asyncio.get_running_loop().time())

    async def unless_left(self, step: Awaitable[T]) -> T | None:
        """Return the step's result; None if the client disconnected, Draining if the job moves. Both end the
        step."""
        result = None
        try:
            async with asyncio.timeout(None) as self._waiting:
                result = await step
        except TimeoutError:
            if not (self.client_left or self.must_move):
                raise
        finally:
            self._waiting = None
        if self.must_move:
            raise Draining(LEAVING)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._in_flight.leave(self.job_id)
