"""Limits how many media jobs run at once and how long one may wait."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

T = TypeVar("T")
Slots = tuple[asyncio.Semaphore, ...]
"""One slot of each is needed, always in the same order, so that no deadlock is possible."""


class TimeBudget:
    """What is left of a time budget that is spent in steps; `error` is raised when it is over."""

    def __init__(self, seconds: float, error: Exception) -> None:
        self._left = seconds
        self._error = error

    async def spend(self, step: Awaitable[T]) -> T:
        if self._left == math.inf:
            return await step
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await step
        except TimeoutError:
            raise self._error from None
        finally:
            self._left -= time.monotonic() - began


UNLIMITED = TimeBudget(math.inf, TimeoutError())


async def acquire_all(slots: Sequence[asyncio.Semaphore], waiting: TimeBudget) -> None:
    taken: list[asyncio.Semaphore] = []
    try:
        for slot in slots:
            await waiting.spend(slot.acquire())
            taken.append(slot)
    except BaseException:
        release_all(taken)
        raise


def release_all(slots: Sequence[asyncio.Semaphore]) -> None:
    for slot in slots:
        slot.release()
