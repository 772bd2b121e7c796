"""Watches the engine: dead ends the worker, hung takes it out of service until it answers again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_vllm.engine.base import Engine
    from dynamo_vllm.job import Job

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Rank:
    """What was seen of one data-parallel rank."""

    progress_at: float
    seen: int = -1
    canary: asyncio.Task[None] | None = None
    sent_at: float = 0.0


class Monitor:
    """Looks every `health_seconds`; a rank without output for `canary_seconds` must answer a canary job.

    An engine that was told to stand still is not asked.

    A stopped engine passes vLLM's own health check, only a job shows the hang, and only of its own rank.
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
    ) -> None:
        self._engine = engine
        self._make_canary = make_canary
        self._on_hang = on_hang
        self._on_answer = on_answer
        self._is_watched = is_watched
        self._health_seconds = health_seconds
        self._canary_seconds = canary_seconds
        self._timeout = canary_timeout_seconds
        self._numbers = itertools.count(1)
        self._ranks: dict[int, Rank] = {}

    async def run(self) -> None:
        """Until cancelled; raises EngineDead when the engine is gone."""
        try:
            while True:
                await self.look()
                await self._pause()
        finally:
            for canary in self._canaries():
                canary.cancel()

    async def look(self) -> None:
        """The worker is hung while one of its ranks is, and answers when none is."""
        await self._engine.check_health()
        now = time.monotonic()
        if not self._is_watched():
            for rank in self._ranks.values():
                rank.progress_at = rank.sent_at = now
            return
        has_answered, hung = False, list[str]()
        for number, seen in self._engine.outputs_seen().items():
            rank = self._ranks.setdefault(number, Rank(now))
            if rank.canary is not None and rank.canary.done():
                canary, rank.canary = rank.canary, None
                answered(canary)
                rank.progress_at, has_answered = now, True
            if seen != rank.seen:
                rank.seen, rank.progress_at = seen, now
            silent = now - rank.progress_at
            if rank.canary is None:
                if silent >= self._canary_seconds:
                    rank.sent_at, rank.canary = now, asyncio.create_task(self._ask(number))
            elif now - rank.sent_at >= self._timeout and silent >= self._timeout:
                hung.append(f"rank {number} of the engine gave nothing for {silent:.0f} s")
        if hung:
            await self._on_hang("; ".join(hung))
        elif has_answered:
            await self._on_answer()

    async def _ask(self, rank: int) -> None:
        job = await self._make_canary(f"canary-{next(self._numbers)}", rank)
        await self._engine.stream(job, lambda _: None)

    def _canaries(self) -> list[asyncio.Task[None]]:
        return [rank.canary for rank in self._ranks.values() if rank.canary is not None]

    async def _pause(self) -> None:
        """Until the next look; an answered canary ends the pause early."""
        if waiting := self._canaries():
            await asyncio.wait(
                waiting, timeout=min(self._health_seconds, 1.0), return_when=asyncio.FIRST_COMPLETED
            )
        else:
            await asyncio.sleep(min(self._health_seconds, self._canary_seconds))


def answered(canary: asyncio.Task[None]) -> None:
    """A refusal is an answer too, a full queue for one; only a dead engine is none."""
    exc = canary.exception()
    if isinstance(exc, EngineDead):
        raise exc
    if exc is not None:
        logger.warning("the canary was refused: %s", exc)
