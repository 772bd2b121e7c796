"""Computes when requests are sent. Every client process computes the same times and sends its share."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def moments(rate: float, kind: str, seed: str) -> Iterator[float]:
    """Yield the times of requests, in seconds from the start, without end."""
    if kind == "even":
        return (number / rate for number in itertools.count())
    return _poisson(rate, seed)


def _poisson(rate: float, seed: str) -> Iterator[float]:
    dice, at = random.Random(seed), 0.0
    while True:
        at += dice.expovariate(rate)
        yield at


def ramp(first: float, last: float, steps: int) -> list[float]:
    """Return rates from the first to the last in equal steps, both included."""
    if steps == 1:
        return [last]
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]
