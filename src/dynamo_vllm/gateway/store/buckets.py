"""Computes what limits allow: token buckets that refill continuously, a counter per day, running requests.

A bucket is kept as what was taken out of it, so that another limit applies at once to what was used before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.gateway.store.keys import Limits

MINUTE = 60.0
DAY = 86400
CLOCK_SECONDS = 5.0
"""What the clocks of gateways may differ; a counter that is further ahead was written with a wrong clock."""
LONGEST_REFILL = 60 * MINUTE
"""No bucket keeps a key out for longer, however much more than reserved a request has used."""
CONCURRENT = "concurrent"
_ROUNDING = 1e-6


@dataclass(slots=True)
class Counter:
    """The counters of one key or tenant: a row of the database."""

    subject: str
    requests: float = 0.0
    tokens: float = 0.0
    updated: float = 0.0
    day: int = 0
    day_tokens: int = 0
    running: int = 0

    def advance(self, limits: Limits, now: float) -> bool:
        """Refill the buckets up to now; a clock that is a little behind another gateway's changes nothing.

        Return whether a clock was ahead and is right again, which must be written even for a refused request.
        """
        was_ahead = now < self.updated - CLOCK_SECONDS
        if was_ahead:
            self.updated = now
            self.day = min(self.day, day_of(now))
        seconds = max(0.0, now - self.updated)
        self.requests = _refilled(self.requests, limits.requests_per_minute, seconds)
        self.tokens = _refilled(self.tokens, limits.tokens_per_minute, seconds)
        self.updated += seconds
        if self.day < day_of(now):
            self.day, self.day_tokens = day_of(now), 0
        return was_ahead

    def take(self, tokens: int, *, requests: int = 1, seats: int = 1) -> None:
        """Begin a request."""
        if min(tokens, requests, seats) < 0:
            raise ValueError(f"a request cannot give anything back: {tokens} tokens")
        self.requests += requests
        self.tokens += tokens
        self.day_tokens += tokens
        self.running += seats

    def change(self, tokens: int, day: int, running: int) -> None:
        """Correct what a request took; tokens of a past day are past.

        The bucket is not refilled first, which needs the limit. The result is the same, but for a request
        that used more than it reserved and ran so long that the bucket was full again: it got the tokens
        meanwhile.
        """
        self.tokens = max(0.0, self.tokens + tokens)
        if day == self.day:
            self.day_tokens = max(0, self.day_tokens + tokens)
        self.running = max(0, self.running + running)


def _refilled(taken: float, limit: int | None, seconds: float) -> float:
    if limit is None:
        return 0.0
    per_second = limit / MINUTE
    return max(0.0, min(taken, per_second * LONGEST_REFILL) - per_second * seconds)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A limit that a request does not fit into."""

    kind: str
    """The name of the limit in `Limits`."""
    limit: int
    used: int
    asked: int
    wait_seconds: float | None
    """None: no waiting helps."""


def obstacles(
    counter: Counter, limits: Limits, tokens: int, now: float, *, requests: int = 1, seats: int = 1
) -> list[Obstacle]:
    """Return the limits that do not allow a request now; the counter was advanced."""
    found = []
    for kind, limit, taken, asked in (
        ("requests_per_minute", limits.requests_per_minute, counter.requests, requests),
        ("tokens_per_minute", limits.tokens_per_minute, counter.tokens, tokens),
    ):
        if limit is not None and asked and taken + asked > limit + _ROUNDING:
            wait = (taken + asked - limit) / limit * MINUTE if asked <= limit else None
            found.append(Obstacle(kind, limit, math.ceil(taken - _ROUNDING), asked, wait))
    limit = limits.tokens_per_day
    if limit is not None and tokens and counter.day_tokens + tokens > limit:
        wait = (day_of(now) + 1) * DAY - now if tokens <= limit else None
        found.append(Obstacle("tokens_per_day", limit, counter.day_tokens, tokens, wait))
    if limits.concurrent is not None and seats and counter.running >= limits.concurrent:
        found.append(Obstacle(CONCURRENT, limits.concurrent, counter.running, 1, 1.0))
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """What a bucket says of itself in headers."""

    limit: int
    remaining: int
    reset_seconds: float
    """When the bucket is full again."""

    @classmethod
    def of(cls, limit: int | None, taken: float) -> Window | None:
        if limit is None:
            return None
        return cls(limit, max(0, math.floor(limit - taken + _ROUNDING)), taken / limit * MINUTE)


def tighter(one: Window | None, other: Window | None) -> Window | None:
    """Return the window with less left in it."""
    if one is None or other is None:
        return one or other
    return one if one.remaining <= other.remaining else other


def day_of(seconds: float) -> int:
    """Return the number of the UTC day."""
    return int(seconds // DAY)


def duration(seconds: float) -> str:
    """Write a duration as OpenAI does: 120ms, 1s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000 - _ROUNDING)}ms" if seconds > _ROUNDING else "0s"
    whole = math.ceil(seconds - _ROUNDING)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
