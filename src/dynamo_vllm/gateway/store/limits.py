"""Admits requests within the limits of their key and tenant, and gives back what they did not use.

All requests that wait are decided in one transaction, each for its key and its tenant together: all or
nothing. Several gateways with one database share the limits exactly.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.cost import MOST_TOKENS
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store import reservations as reserved
from dynamo_vllm.gateway.store.buckets import CONCURRENT, Obstacle, Window, duration, obstacles, tighter
from dynamo_vllm.gateway.store.gathering import Gathered
from dynamo_vllm.gateway.store.reservations import Reservation
from dynamo_vllm.gateway.store.seats import Seats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.gateway.store.buckets import Counter
    from dynamo_vllm.gateway.store.keys import Key, Limits, Tenant

logger = logging.getLogger(__name__)
RECORD_SECONDS = 120.0
"""How long a request that ended waits for the record of its tokens; `expire` then takes it as unused."""
EXPIRED_TOGETHER = 1000
RELEASE_PAUSES = (0.1, 1.0, 10.0, 60.0, 300.0)
"""Seconds between tries to give back what was reserved for a client that went away at that moment."""
SEAT_SECONDS = 1.0
"""How long a request waits for another one of its key to end. A client that sends one after the other knows
of an end before we do."""
SEAT_POLL_SECONDS = 0.1
"""How often it asks again: nobody tells of ends at other gateways."""
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
    now: float | None
    subjects: list[tuple[str, Limits]]
    """What has limits: its row of counters."""
    is_deferred: bool
    is_over: bool

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

    def __init__(self, database: Database, gateway: str, *, seat_seconds: float = 0.0) -> None:
        """`gateway` holds the reservations: it tells of their ends, or is found dead (`Holders`)."""
        self._database = database
        self._gateway = gateway
        self._seat_seconds = seat_seconds
        self._seats = Seats()
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
        is_deferred: bool = False,
        is_over: bool = False,
        now: float | None = None,
    ) -> Admitted | Refused:
        """Reserve what a request may use: its prompt and `max_tokens`.

        `parts` is the number of records that end it. Without limits the database is not asked. An id that was
        admitted before is admitted again and counted once. A deferred request may have ended since then: it
        is the second run of one that failed, or what a client's request has left to do. It needs room again,
        but is no further request. One that is over holds nothing: it is only counted.
        """
        subjects = _subjects(key, tenant)
        if not subjects:
            return Admitted()
        tokens = max(0, min(tokens, MOST_TOKENS))
        request = _Asked(
            request_id, key, tenant, tokens, 0 if is_deferred else parts, now, subjects, is_deferred, is_over
        )
        outcome = await self._admit(request)
        names = [subject for subject, _ in subjects]
        deadline = time.monotonic() + self._seat_seconds
        while isinstance(outcome, Refused) and outcome.kind == CONCURRENT and self._seats.have_room(names):
            if (seconds := deadline - time.monotonic()) <= 0:
                break
            await self._seats.wait(names, min(seconds, SEAT_POLL_SECONDS))
            outcome = await self._admit(request)
        return outcome

    async def ended(self, request_ids: Iterable[str], *, now: float | None = None) -> None:
        """Note that requests have ended: others may run. Tokens come back with the record of those used."""
        await self._end(request_ids, now, release=False)

    async def release(self, request_ids: Iterable[str], *, now: float | None = None) -> None:
        """Note that requests have ended without using tokens. They still count as requests."""
        await self._end(request_ids, now, release=True)

    async def _end(self, request_ids: Iterable[str], now: float | None, *, release: bool) -> None:
        """Close each on its own, so that one that cannot be closed fails alone; raise what failed."""
        closings = [_Closing(request_id, now, release, self._gateway) for request_id in request_ids]
        results = await asyncio.gather(
            *(self._close(closing) for closing in closings), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
            self._seats.free(result)

    async def lose(self, gateway: str, seconds_ago: float = 0.0) -> int:
        """Release what a gateway held some seconds ago: it is dead, or its Envoy was killed."""
        return await self._expire(lambda t: _expire_some(t, t.now() - seconds_ago, gateway, t.now()))

    async def expire(self, older_than: float, *, gateway: str | None = None, now: float | None = None) -> int:
        """Release reservations from before a time whose gateway or worker has died, and return how many.

        Only those of one gateway if it is named: a gateway that starts again knows that its old ones are
        over. Requests that ended are released after `RECORD_SECONDS` without a record.
        """
        return await self._expire(
            lambda t: _expire_some(t, older_than, gateway, t.now() if now is None else now)
        )

    async def _expire(self, some: Callable[[Transaction], int]) -> int:
        count = 0
        while closed := await self._database.run(some, exclusive=True):
            count += closed
        if count:
            logger.info("%d reservations without an end were released", count)
        return count

    def _admit_all(self, t: Transaction, asked: list[_Asked]) -> list[Admitted | Refused]:
        known = reserved.read(t, {request.request_id for request in asked})
        names = {subject for request in asked for subject, _ in request.subjects}
        names |= {subject for reservation in known.values() for subject in reservation.subjects}
        counters = reserved.read_counters(t, names)
        changed: dict[str, Reservation] = {}
        subjects: set[str] = set()
        results: list[Admitted | Refused] = []
        for request in asked:
            now = t.now() if request.now is None else request.now
            before = known.get(request.request_id)
            subjects |= {s for s, limits in request.subjects if counters[s].advance(limits, now)}
            after = _reservation(request, before, self._gateway, now)
            decision = _decide(request, before, after, counters, now)
            if isinstance(decision, Admitted) and after != before:
                known[request.request_id] = changed[request.request_id] = after
                subjects.update(after.subjects)
            results.append(decision)
        reserved.write_counters(t, [counters[subject] for subject in subjects])
        reserved.write(t, changed.values())
        return results

    def _nobody_waits(self, one: _Asked, decided: Admitted | Refused) -> None:
        """Release what was reserved for a client that went away meanwhile."""
        if isinstance(decided, Admitted):
            task = asyncio.create_task(self._release_until_done(one.request_id, one.now))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release_until_done(self, request_id: str, now: float | None) -> None:
        for seconds in RELEASE_PAUSES:
            try:
                return await self.release([request_id], now=now)
            except Exception as exc:
                logger.warning("request %s: could not be released, trying again: %s", request_id, exc)
                await asyncio.sleep(seconds)


def _reservation(request: _Asked, before: Reservation | None, gateway: str, now: float) -> Reservation:
    """Return what is to be reserved, given what is."""
    if before is None:
        return Reservation(
            request_id=request.request_id,
            key="" if request.key.limits.are_none else request.key.id,
            tenant="" if request.tenant.limits.are_none else request.tenant.name,
            gateway=gateway,
            tokens=request.tokens,
            parts=request.parts,
            began=now,
            ended=now if request.is_over else None,
            is_released=request.is_over,
            charged=0 if request.is_over else request.tokens,
            is_running=not request.is_over,
        )
    if not request.is_deferred:
        return before
    again = replace(
        before, gateway=gateway, tokens=request.tokens, parts=0, began=now, ended=None, is_released=False
    )
    return replace(again, charged=max(before.charged, again.owed), is_running=True)


def _decide(
    request: _Asked, before: Reservation | None, after: Reservation, counters: dict[str, Counter], now: float
) -> Admitted | Refused:
    """Take from the counters what the request needs more than before, or nothing."""
    tokens = after.charged - (0 if before is None else before.charged)
    seats = int(after.is_running) - (0 if before is None else int(before.is_running))
    requests = int(before is None)
    refusals: list[tuple[str, Obstacle]] = []
    for subject, limits in request.subjects:
        if after != before:
            here = obstacles(counters[subject], limits, tokens, now, requests=requests, seats=seats)
            refusals += [(request.words(subject), obstacle) for obstacle in here]
    if not refusals and after != before:
        for subject in after.subjects:
            counters[subject].take(tokens, requests=requests, seats=seats)
    request_window = token_window = None
    for subject, limits in request.subjects:
        counter = counters[subject]
        request_window = tighter(request_window, Window.of(limits.requests_per_minute, counter.requests))
        token_window = tighter(token_window, Window.of(limits.tokens_per_minute, counter.tokens))
    if refusals:
        return _refusal(*max(refusals, key=lambda pair: _wait(pair[1])), request_window, token_window)
    return Admitted(request_window, token_window, is_counted=True)


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


@dataclass(frozen=True, slots=True)
class _Closing:
    request_id: str
    now: float | None
    release: bool
    gateway: str


def _close_all(t: Transaction, closings: list[_Closing]) -> list[list[str]]:
    """Return for each the subjects that have room now."""
    reservations = reserved.read(t, {closing.request_id for closing in closings})
    subjects: list[list[str]] = []
    for closing in closings:
        reservation = reservations.get(closing.request_id)
        if reservation is None or (reservation.is_deferred and reservation.gateway != closing.gateway):
            subjects.append([])  # a client's request has ended; what it left to do has not
            continue
        now = t.now() if closing.now is None else closing.now
        reservation.ended = now if reservation.ended is None else reservation.ended
        reservation.is_released |= closing.release
        subjects.append(reservation.subjects)
    reserved.settle(t, reservations.values())
    return subjects


def _expire_some(t: Transaction, older_than: float, gateway: str | None, now: float) -> int:
    found = reserved.unsettled(t, older_than, now - RECORD_SECONDS, gateway, EXPIRED_TOGETHER)
    for one in found:
        one.ended = now if one.ended is None else one.ended
        one.is_released = True
    reserved.settle(t, found)
    return len(found)
