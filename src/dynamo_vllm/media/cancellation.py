"""Stops work in a thread when its time is over or no caller waits for it any more."""

from __future__ import annotations

import threading
import time

from dynamo_vllm.errors import MediaRefused


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def check(self) -> None:
        """Raise if there is no reason to continue."""
        if self._stop.is_set() or time.monotonic() > self._end:
            raise MediaRefused(f"not decoded within {self._seconds:g} s")
