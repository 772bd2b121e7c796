"""Watches the engine: dead ends the worker, hung takes it out of service until it answers again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING

from dynamo_vllm.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_vllm.engine.base import Engine
    from dynamo_vllm.job import Job

logger = logging.getLogger(__name__)


class Monitor:
    """Looks every `health_seconds`; after `canary_seconds` without output a canary job must be answered.

    A stopped engine passes vLLM's own health check, only a job shows the hang.
    """

    def __init__(
        self,
        engine: Engine,
        make_canary: Callable[[str], Awaitable[Job]],
        on_hang: Callable[[str], Awaitable[None]],
        on_answer: Callable[[], Awaitable[None]],
        *,
        health_seconds: float,
        canary_seconds: float,
        canary_timeout_seconds: float,
    ) -> None:
        self._engine = engine
        self._make_canary = make_canary
        self._on_hang = on_hang
        self._on_answer = on_answer
        self._health_seconds = health_seconds
        self._canary_seconds = canary_seconds
        self._timeout = canary_timeout_seconds
        self._numbers = itertools.count(1)
        self._canary: asyncio.Task[None] | None = None
        self._sent_at = 0.0
        self._seen = -1
        self._progress_at = time.monotonic()

    async def run(self) -> None:
        """Until cancelled; raises EngineDead when the engine is gone."""
        try:
            while True:
                await self.look()
                await self._pause()
        finally:
            if self._canary is not None:
                self._canary.cancel()

    async def look(self) -> None:
        await self._engine.check_health()
        now = time.monotonic()
        if self._canary is not None and self._canary.done():
            canary, self._canary = self._canary, None
            answered(canary)
            self._progress_at = now
            await self._on_answer()
        seen = self._engine.outputs_seen()
        if seen != self._seen:
            self._seen, self._progress_at = seen, now
        if self._canary is None:
            if now - self._progress_at >= self._canary_seconds:
                self._sent_at = now
                self._canary = asyncio.create_task(self._ask())
        elif now - self._sent_at >= self._timeout and now - self._progress_at >= self._timeout:
            await self._on_hang(f"the engine gave nothing for {now - self._progress_at:.0f} s")

    async def _ask(self) -> None:
        job = await self._make_canary(f"canary-{next(self._numbers)}")
        async for _ in self._engine.generate(job):
            pass

    async def _pause(self) -> None:
        """Until the next look; an answered canary ends the pause early."""
        waiting = {self._canary} if self._canary is not None else set()
        if waiting:
            await asyncio.wait(waiting, timeout=min(self._health_seconds, 1.0))
        else:
            await asyncio.sleep(min(self._health_seconds, self._canary_seconds))


def answered(canary: asyncio.Task[None]) -> None:
    """A refusal is an answer too, a full queue for one; only a dead engine is none."""
    exc = canary.exception()
    if isinstance(exc, EngineDead):
        raise exc
    if exc is not None:
        logger.warning("the canary was refused: %s", exc)
