"""Watches the engine: a dead one ends the worker, a hung one leaves service until it answers; a slow one
stays."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import EngineDead
from dynamo_vllm.serving.lifecycle.hang_detector import Effort

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dynamo_vllm.engine.base import Engine
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.job import Job

logger = logging.getLogger(__name__)
LATE_SECONDS = 1.0
"""A pause longer than planned by this much means that the worker itself did not run."""


@dataclass(slots=True)
class Rank:
    """Observations of one data-parallel rank."""

    progress_at: float
    seen: int = -1
    canary: asyncio.Task[None] | None = None
    sent_at: float = 0.0
    effort: Effort | None = None
    """Known only while a canary waits, and only for a rank on this machine."""
    is_slow: bool = False

    def note_progress(self, now: float) -> None:
        self.progress_at, self.effort, self.is_slow = now, None, False


class Monitor:
    """Checks every `health_seconds`; a rank without output for `canary_seconds` must answer a canary job.

    A paused or sleeping engine gets no canary.

    A stopped engine passes vLLM's own health check; only a job shows the hang, and only for its own rank. A
    long step delays the answer too. So a rank is hung if its processes are stopped, or do nothing for twice
    `canary_timeout_seconds`, or if one step lasts `step_seconds`. For a rank on another node only silence is
    known; it counts after `canary_timeout_seconds`.
    """

    def __init__(
        self,
        engine: Engine,
        make_canary: Callable[[str, int], Awaitable[Job]],
        on_hang: Callable[[str], Awaitable[None]],
        on_answer: Callable[[], Awaitable[None]],
        is_watched: Callable[[], bool] = lambda: True,
        *,
        health_seconds: float,
        canary_seconds: float,
        canary_timeout_seconds: float,
        step_seconds: float,
    ) -> None:
        self._engine = engine
        self._make_canary = make_canary
        self._on_hang = on_hang
        self._on_answer = on_answer
        self._is_watched = is_watched
        self._health_seconds = health_seconds
        self._canary_seconds = canary_seconds
        self._timeout = canary_timeout_seconds
        self._step_seconds = step_seconds
        self._numbers = itertools.count(1)
        self._ranks: dict[int, Rank] = {}
        self._reading: asyncio.Future[Mapping[int, Vitals]] | None = None

    async def run(self) -> None:
        """Run until cancelled; raises EngineDead when the engine is gone."""
        try:
            while True:
                await self.look()
                self._subtract_lost_time(await self._pause())
        finally:
            for canary in self._canaries():
                canary.cancel()
            if self._reading is not None:
                self._reading.cancel()

    async def look(self) -> None:
        """Take the worker out of service while one of its ranks hangs, and back when none does."""
        await self._engine.check_health()
        if not self._is_watched():
            for rank in self._ranks.values():
                rank.note_progress(now := time.monotonic())
                rank.sent_at = now
            return
        is_owed = not all(canary.done() for canary in self._canaries())
        vitals = await self._vitals() if is_owed else {}
        now = time.monotonic()
        has_answered, hung = False, list[str]()
        for number, seen in self._engine.outputs_seen().items():
            rank = self._ranks.setdefault(number, Rank(now))
            if rank.canary is not None and rank.canary.done():
                canary, rank.canary = rank.canary, None
                raise_if_dead(canary)
                rank.note_progress(now)
                has_answered = True
            if seen != rank.seen:
                rank.seen = seen
                rank.note_progress(now)
            if rank.canary is None:
                if now - rank.progress_at >= self._canary_seconds:
                    rank.sent_at, rank.canary = now, asyncio.create_task(self._send_canary(number))
            elif (reason := self._verdict(number, rank, vitals.get(number), now)) is not None:
                hung.append(f"rank {number} of the engine produced no output for {reason}")
        if hung:
            await self._on_hang("; ".join(hung))
        elif has_answered:
            await self._on_answer()

    def _verdict(self, number: int, rank: Rank, vitals: Vitals | None, now: float) -> str | None:
        """Return how long a rank that owes an answer was silent and why that is a hang; None if it is not."""
        silent = now - rank.progress_at
        is_overdue = min(silent, now - rank.sent_at) >= self._timeout
        if is_overdue and silent >= self._step_seconds:
            return f"{silent:.0f} s, more than one step may take (--step-seconds)"
        if vitals is None:
            return f"{silent:.0f} s" if is_overdue else None
        if rank.effort is None:
            rank.effort = Effort(now, vitals, 2 * self._timeout)
        rank.effort.note(now, vitals)
        if (reason := rank.effort.verdict(now)) is not None:
            return f"{silent:.0f} s: {reason}"
        if is_overdue and rank.effort.has_worked and not rank.is_slow:
            rank.is_slow = True
            logger.warning(
                "rank %d of the engine has worked on one step for %.0f s: slow, not hung", number, silent
            )
        return None

    async def _vitals(self) -> Mapping[int, Vitals]:
        """Read the activity; None if it cannot be read in time: a hung driver blocks its callers."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._engine.vitals())
        await asyncio.wait({self._reading}, timeout=self._timeout)
        if not self._reading.done():
            return {}
        reading, self._reading = self._reading, None
        return reading.result()

    def _subtract_lost_time(self, late_seconds: float) -> None:
        """Subtract time in which the worker itself was stopped or had no CPU."""
        if late_seconds < LATE_SECONDS:
            return
        for rank in self._ranks.values():
            rank.progress_at += late_seconds
            rank.sent_at += late_seconds
            if rank.effort is not None:
                rank.effort.shift(late_seconds)

    async def _send_canary(self, rank: int) -> None:
        job = await self._make_canary(f"canary-{next(self._numbers)}", rank)
        await self._engine.stream(job, lambda _: None)

    def _canaries(self) -> list[asyncio.Task[None]]:
        return [rank.canary for rank in self._ranks.values() if rank.canary is not None]

    async def _pause(self) -> float:
        """Sleep until the next check; an answered canary ends it early. Returns by how much it was late."""
        began, waiting = time.monotonic(), self._canaries()
        if waiting:
            seconds = min(self._health_seconds, 1.0)
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            seconds = min(self._health_seconds, self._canary_seconds)
            await asyncio.sleep(seconds)
        return time.monotonic() - began - seconds


def raise_if_dead(canary: asyncio.Task[None]) -> None:
    """A refusal, such as a full queue, is an answer too; only a dead engine gives none."""
    exc = canary.exception()
    if isinstance(exc, EngineDead):
        raise exc
    if exc is not None:
        logger.warning("the canary was refused: %s", exc)
