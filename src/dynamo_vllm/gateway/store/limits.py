"""Admits requests within the limits of their key and tenant, and gives back what they did not use.

All requests that wait are decided in one transaction, each for its key and its tenant together: all or
nothing. Several gateways with one database share the limits exactly.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store import reservations as reserved
from dynamo_vllm.gateway.store.buckets import Obstacle, Window, duration, obstacles, tighter
from dynamo_vllm.gateway.store.gathering import Gathered
from dynamo_vllm.gateway.store.reservations import Reservation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.gateway.store.buckets import Counter
    from dynamo_vllm.gateway.store.keys import Key, Limits, Tenant

logger = logging.getLogger(__name__)
RECORD_SECONDS = 120.0
"""How long a request that ended waits for the record of its tokens; `expire` then takes it as unused."""
EXPIRED_TOGETHER = 1000
_UNITS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "tokens_per_day": "tokens per day (UTC)",
    "concurrent": "requests at the same time",
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may pass."""

    requests: Window | None = None
    tokens: Window | None = None
    is_counted: bool = False
    """Whether something is reserved, so that the request's end must be told (`ended` or `release`)."""

    def headers(self) -> dict[str, str]:
        return _headers(self.requests, self.tokens)


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that does not fit into a limit."""

    message: str
    code: str
    status: int
    retry_after: int | None
    """Seconds; None if no waiting helps."""
    kind: str
    """The limit's name in `Limits`."""
    requests: Window | None = None
    tokens: Window | None = None

    def headers(self) -> dict[str, str]:
        found = _headers(self.requests, self.tokens)
        return found if self.retry_after is None else {**found, "retry-after": str(self.retry_after)}

    def error(self) -> GatewayError:
        return GatewayError(self.status, self.message, code=self.code, headers=self.headers())


def _headers(requests: Window | None, tokens: Window | None) -> dict[str, str]:
    found = {}
    for name, window in (("requests", requests), ("tokens", tokens)):
        if window is not None:
            found[f"x-ratelimit-limit-{name}"] = str(window.limit)
            found[f"x-ratelimit-remaining-{name}"] = str(window.remaining)
            found[f"x-ratelimit-reset-{name}"] = duration(window.reset_seconds)
    return found


@dataclass(frozen=True, slots=True)
class _Asked:
    request_id: str
    key: Key
    tenant: Tenant
    tokens: int
    parts: int
    now: float
    subjects: list[tuple[str, Limits]]
    """What has limits: its row of counters."""

    def words(self, subject: str) -> str:
        """Return a subject for messages: the id of a key says nothing to its owner."""
        is_key = subject == reserved.key_subject(self.key.id)
        return f"key {self.key.prefix}" if is_key else f"tenant {self.tenant.name}"


def _subjects(key: Key, tenant: Tenant) -> list[tuple[str, Limits]]:
    found = []
    if not key.limits.are_none:
        found.append((reserved.key_subject(key.id), key.limits))
    if not tenant.limits.are_none:
        found.append((reserved.tenant_subject(tenant.name), tenant.limits))
    return found


class Limiter:
    """Admits requests at one gateway. It belongs to one event loop."""

    def __init__(self, database: Database, gateway: str) -> None:
        self._database = database
        self._gateway = gateway
        self._admit = Gathered(database, self._admit_all, self._nobody_waits)
        self._close = Gathered(database, _close_all)
        self._releases: set[asyncio.Task[None]] = set()

    async def admit(
        self,
        request_id: str,
        key: Key,
        tenant: Tenant,
        tokens: int,
        *,
        parts: int = 1,
        now: float | None = None,
    ) -> Admitted | Refused:
        """Reserve what a request may use: its prompt and `max_tokens`.

        `parts` is the number of records that end it, or 0 if only `ended` does. Without limits the database
        is not asked. An id that was admitted before is admitted again and counted once.
        """
        subjects = _subjects(key, tenant)
        if not subjects:
            return Admitted()
        return await self._admit(_Asked(request_id, key, tenant, tokens, parts, _time(now), subjects))

    async def ended(self, request_ids: Iterable[str], *, now: float | None = None) -> None:
        """Note that requests have ended: others may run. Tokens come back with the record of those used."""
        await self._close(_Closing(tuple(request_ids), _time(now), release=False))

    async def release(self, request_ids: Iterable[str], *, now: float | None = None) -> None:
        """Note that requests have ended without using tokens. They still count as requests."""
        await self._close(_Closing(tuple(request_ids), _time(now), release=True))

    async def expire(self, older_than: float, *, gateway: str | None = None, now: float | None = None) -> int:
        """Release reservations from before a time whose gateway or worker has died, and return how many.

        Only those of one gateway if it is named: a gateway that starts again knows that its old ones are
        over. Requests that ended are released after `RECORD_SECONDS` without a record.
        """
        moment, count = _time(now), 0
        while found := await self._database.run(
            lambda t: _expire_some(t, older_than, gateway, moment), exclusive=True
        ):
            count += found
        if count:
            logger.info("%d reservations without an end were released", count)
        return count

    def _admit_all(self, t: Transaction, asked: list[_Asked]) -> list[Admitted | Refused]:
        known = reserved.read(t, {one.request_id for one in asked})
        counters = reserved.read_counters(t, {subject for one in asked for subject, _ in one.subjects})
        made: dict[str, Reservation] = {}
        changed: dict[str, Counter] = {}
        results: list[Admitted | Refused] = []
        for one in asked:
            decided = _decide(one, counters, is_known=one.request_id in known or one.request_id in made)
            results.append(decided)
            if isinstance(decided, Admitted) and not (one.request_id in known or one.request_id in made):
                made[one.request_id] = _reservation(one, self._gateway)
                changed |= {subject: counters[subject] for subject, _ in one.subjects}
        reserved.write_counters(t, changed.values())
        reserved.write(t, made.values())
        return results

    def _nobody_waits(self, one: _Asked, decided: Admitted | Refused) -> None:
        """Release what was reserved for a client that went away meanwhile."""
        if isinstance(decided, Admitted):
            task = asyncio.create_task(self.release([one.request_id], now=one.now))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)


def _decide(asked: _Asked, counters: dict[str, Counter], *, is_known: bool) -> Admitted | Refused:
    """Take from the counters what the request needs, or nothing."""
    found: list[tuple[str, Obstacle]] = []
    for subject, limits in asked.subjects:
        counters[subject].advance(limits, asked.now)
        if not is_known:
            seen = obstacles(counters[subject], limits, asked.tokens, asked.now)
            found += [(asked.words(subject), one) for one in seen]
    if not found and not is_known:
        for subject, _ in asked.subjects:
            counters[subject].take(asked.tokens)
    requests = tokens = None
    for subject, limits in asked.subjects:
        requests = tighter(requests, Window.of(limits.requests_per_minute, counters[subject].requests))
        tokens = tighter(tokens, Window.of(limits.tokens_per_minute, counters[subject].tokens))
    if found:
        return _refusal(*max(found, key=lambda one: _wait(one[1])), requests, tokens)
    return Admitted(requests, tokens, is_counted=True)


def _wait(obstacle: Obstacle) -> float:
    return math.inf if obstacle.wait_seconds is None else obstacle.wait_seconds


def _refusal(who: str, obstacle: Obstacle, requests: Window | None, tokens: Window | None) -> Refused:
    unit = _UNITS[obstacle.kind]
    if obstacle.wait_seconds is None:
        # 400 and not 429: clients repeat a 429, and this request can never pass.
        message = (
            f"Request too large: it needs up to {obstacle.asked} tokens (prompt and max_tokens), and {who} "
            f"may use {obstacle.limit} {unit}. No waiting helps; shorten the prompt or lower max_tokens."
        )
        return Refused(message, "request_too_large", 400, None, obstacle.kind, requests, tokens)
    seconds = max(1, math.ceil(obstacle.wait_seconds))
    message = (
        f"Rate limit reached for {who}: {obstacle.limit} {unit}, used {obstacle.used}, requested "
        f"{obstacle.asked}. Try again in {duration(seconds)}."
    )
    return Refused(message, "rate_limit_exceeded", 429, seconds, obstacle.kind, requests, tokens)


def _reservation(asked: _Asked, gateway: str) -> Reservation:
    return Reservation(
        request_id=asked.request_id,
        key="" if asked.key.limits.are_none else asked.key.id,
        tenant="" if asked.tenant.limits.are_none else asked.tenant.name,
        gateway=gateway,
        tokens=asked.tokens,
        parts=asked.parts,
        began=asked.now,
        charged=asked.tokens,
        is_running=True,
    )


@dataclass(frozen=True, slots=True)
class _Closing:
    request_ids: tuple[str, ...]
    now: float
    release: bool


def _close_all(t: Transaction, closings: list[_Closing]) -> list[None]:
    found = reserved.read(t, {request_id for one in closings for request_id in one.request_ids})
    for closing in closings:
        for request_id in closing.request_ids:
            if (one := found.get(request_id)) is not None:
                one.ended = closing.now if one.ended is None else one.ended
                one.is_released |= closing.release
    reserved.settle(t, found.values())
    return [None] * len(closings)


def _expire_some(t: Transaction, older_than: float, gateway: str | None, now: float) -> int:
    found = reserved.unsettled(t, older_than, now - RECORD_SECONDS, gateway, EXPIRED_TOGETHER)
    for one in found:
        one.ended = now if one.ended is None else one.ended
        one.is_released = True
    reserved.settle(t, found)
    return len(found)


def _time(now: float | None) -> float:
    return time.time() if now is None else now
