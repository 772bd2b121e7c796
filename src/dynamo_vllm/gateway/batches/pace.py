"""Limits how many lines of batches run at a time, and lets interactive requests go first."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_SECONDS = 0.1


class Pace:
    """A context for each line: all batches of a gateway share one, and take turns in it."""

    def __init__(self, concurrency: int, busy: Callable[[], float]) -> None:
        self._concurrency = concurrency
        self._busy = busy
        self._line = asyncio.Lock()  # first come, first served
        self._changed = asyncio.Event()
        self.running = 0

    def allowed(self) -> int:
        """Return how many may run now: fewer the busier the deployment is, but always one."""
        return max(1, round(self._concurrency * (1.0 - min(max(self._busy(), 0.0), 1.0))))

    async def __aenter__(self) -> Self:
        async with self._line:
            while self.running >= self.allowed():
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):  # the load changes without a word
                        await self._changed.wait()
            self.running += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running -= 1
        self._changed.set()
