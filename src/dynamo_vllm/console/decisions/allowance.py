"""Limits what may be spent on something that can also be left out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Allowance:
    """So much CPU time per second (`share`), of which at most `most_seconds` are saved up."""

    def __init__(
        self, share: float, most_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._most = self._left = most_seconds
        self._clock = clock
        self._at = clock()

    def has_some(self) -> bool:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._share)
        self._at = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        self._left -= seconds
