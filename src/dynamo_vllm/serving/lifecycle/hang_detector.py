"""Tells a slow rank from a hung one. Pure: it is given the time and what the processes do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.engine.process.activity import Vitals

WORKING_SHARE = 0.05
"""Share of one CPU. A computing step uses all it gets; a waiting thread stays below."""
STOPPED_SAMPLES = 2
"""A single stopped sample may be a profiler that holds the process for a moment."""


class Effort:
    """What a rank did since it last showed progress; observed while it owes an answer."""

    def __init__(self, now: float, vitals: Vitals, window_seconds: float) -> None:
        self._window = window_seconds
        self._stopped_samples = 0
        self.has_worked = False
        self._begin(now, vitals.cpu_seconds)

    def _begin(self, now: float, cpu_seconds: float) -> None:
        self._since, self._cpu_seconds = now, cpu_seconds
        self._samples = self._active_samples = 0

    def shift(self, seconds: float) -> None:
        """Ignore time in which the worker itself did not run."""
        self._since += seconds

    def note(self, now: float, vitals: Vitals) -> None:
        self._stopped_samples = self._stopped_samples + 1 if vitals.is_stopped else 0
        self._samples += 1
        self._active_samples += vitals.is_active
        self._cpu_seconds = min(self._cpu_seconds, vitals.cpu_seconds)  # less if a child process has ended
        span = now - self._since
        used = vitals.cpu_seconds - self._cpu_seconds
        # On a machine short of CPUs, or while it waits for a GPU or a disk, it uses little CPU but is seen
        # active.
        seen = span >= self._window and 2 * self._active_samples >= self._samples
        if used >= WORKING_SHARE * max(span, self._window) or seen:
            self.has_worked = True
            self._begin(now, vitals.cpu_seconds)

    def verdict(self, now: float) -> str | None:
        """Return why the rank is hung; None while it works, or may."""
        if self._stopped_samples >= STOPPED_SAMPLES:
            return "its process is stopped"
        idle = now - self._since
        return f"used no processor time for {idle:.0f} s" if idle >= self._window else None
