"""Tells the limits which requests have ended, soon and until the database has it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.gateway.store.limits import Limiter

logger = logging.getLogger(__name__)
GATHER_SECONDS = 0.02
"""How long an end waits for others: they are one transaction."""
IDLE_SECONDS = 10.0
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
MOST_NOTED = 100_000
"""Requests whose end the database does not have yet; older ones come back as those of a dead gateway do."""


class Endings:
    """Collects ends and settles them. It belongs to one event loop."""

    def __init__(self, limits: Limiter, gateway: str, beat: Callable[[], None]) -> None:
        """`gateway` is the one that holds the reservations of `limits`; `beat` shows that `run` turns."""
        self._limits = limits
        self._gateway = gateway
        self._beat = beat
        self._ended: list[str] = []
        self._unused: list[str] = []
        self._lost_at: float | None = None
        self._news = asyncio.Event()

    def ended(self, request_id: str) -> None:
        """Note an end; the workers' records say which tokens it used."""
        self._ended.append(request_id)
        self._news.set()

    def unused(self, request_id: str) -> None:
        """Note an end without an answer: no worker counts tokens of it."""
        self._unused.append(request_id)
        self._news.set()

    def all_lost(self) -> None:
        """Note that all requests until now have ended without a word: Envoy was killed."""
        self._lost_at = time.monotonic()
        self._news.set()

    async def run(self) -> None:
        """Settle ends until cancelled."""
        wait = FIRST_WAIT_SECONDS
        while True:
            self._beat()
            if await self._settle():
                wait = FIRST_WAIT_SECONDS
                await self._some_news()
            else:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _some_news(self) -> None:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                await self._news.wait()
                await asyncio.sleep(GATHER_SECONDS)
        except TimeoutError:
            return

    async def _settle(self) -> bool:
        self._news.clear()
        ended, self._ended = self._ended, []
        unused, self._unused = self._unused, []
        lost_at, self._lost_at = self._lost_at, None
        try:
            if lost_at is not None:
                await self._limits.lose(self._gateway, time.monotonic() - lost_at)
            if ended:
                await self._limits.ended(ended)
            if unused:
                await self._limits.release(unused)
        except Exception as exc:  # each end was tried on its own; trying one again changes nothing
            self._ended = (ended + self._ended)[-MOST_NOTED:]
            self._unused = (unused + self._unused)[-MOST_NOTED:]
            self._lost_at = self._lost_at or lost_at
            logger.warning("ended requests could not be settled, trying again: %s", exc)
            return False
        return True
