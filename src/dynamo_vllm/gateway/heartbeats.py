"""Knows whether the loops of a process still turn, for its health check."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT_SECONDS = 120.0
"""More than a loop waits for a database that is away: ending the process would not bring that back."""


class Heartbeats:
    """Counts a loop as stopped that has not beaten for too long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, float]] = {}
        """When each loop beat last, and how long it may be silent."""

    def beat(self, name: str, pause_seconds: float = 0.0) -> None:
        """Show that a loop lives; the next beat may come after a pause."""
        self._last[name] = self._clock(), pause_seconds + SILENT_SECONDS

    def stopped(self) -> list[str]:
        now = self._clock()
        return [name for name, (last, seconds) in self._last.items() if now - last > seconds]
