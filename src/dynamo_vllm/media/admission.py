"""Limits how many media jobs run at once and how long one may wait."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

T = TypeVar("T")
Places = tuple[asyncio.Semaphore, ...]
"""One slot of each is needed, always in the same order, so that no deadlock is possible."""


class Clock:
    """What is left of a time budget that is spent in steps; `late` is raised when it is over."""

    def __init__(self, seconds: float, late: Exception) -> None:
        self._left = seconds
        self._late = late

    async def spend(self, step: Awaitable[T]) -> T:
        if self._left == math.inf:
            return await step
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await step
        except TimeoutError:
            raise self._late from None
        finally:
            self._left -= time.monotonic() - began


FOREVER = Clock(math.inf, TimeoutError())


async def take(places: Sequence[asyncio.Semaphore], waiting: Clock) -> None:
    taken: list[asyncio.Semaphore] = []
    try:
        for place in places:
            await waiting.spend(place.acquire())
            taken.append(place)
    except BaseException:
        give(taken)
        raise


def give(places: Sequence[asyncio.Semaphore]) -> None:
    for place in places:
        place.release()
