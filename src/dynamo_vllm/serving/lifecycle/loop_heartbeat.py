"""Notices that the worker's event loop is blocked."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

BEAT_SECONDS = 1.0
MAX_MISSED = 20


class LoopHeartbeat:
    """A thread requests a heartbeat from the loop every second and counts the seconds without one.

    It counts heartbeats, not time: a process or machine that was itself stopped has missed none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._missed = 0
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name="loop-pulse", daemon=True).start()

    @property
    def stuck_seconds(self) -> float | None:
        """Return how long the loop has been silent; None while that is normal."""
        return self._missed * BEAT_SECONDS if self._missed >= MAX_MISSED else None

    def stop(self) -> None:
        self._ended.set()

    def _ask(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._missed += 1
            try:
                # Request one each time: a single one could fall between reading and writing the count.
                self._loop.call_soon_threadsafe(self._beat)
            except RuntimeError:  # the loop is closed
                return

    def _beat(self) -> None:
        self._missed = 0
