"""Reads and writes what requests have reserved, and corrects the counters when more is known of them.

A reservation has facts (what was reserved and used, whether the request ended) that may arrive in any order
and several times, and what the counters contain of it. `settle` brings the counters to the facts: by the
difference, so each correction is made exactly once. All of it is exclusive work (`Database.run`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.store.buckets import Counter, day_of
from dynamo_vllm.gateway.store.sql import in_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dynamo_vllm.gateway.database import Row, Transaction

_COUNTER = "subject, requests, tokens, updated, day, day_tokens, running"
_RESERVATION = (
    "request_id, key, tenant, gateway, tokens, parts, began, used, finals, ended, is_released, charged,"
    " is_running"
)


@dataclass(slots=True)
class Reservation:
    """A request of a key or tenant with limits."""

    request_id: str
    key: str
    """Its id; empty if it has no limits."""
    tenant: str
    """Its name; empty if it has no limits."""
    gateway: str
    """Who tells of its end; another one gives it back when that is dead."""
    tokens: int
    parts: int
    """How many records with a final outcome end it; 0 if nobody knows."""
    began: float
    used: int = 0
    finals: int = 0
    ended: float | None = None
    is_released: bool = False
    charged: int = 0
    is_running: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether what it used is known. A request that ended still waits for its first final record."""
        return self.is_released or (self.finals > 0 and (self.ended is not None or self._has_all_parts))

    @property
    def _has_all_parts(self) -> bool:
        return 0 < self.parts <= self.finals

    @property
    def owed(self) -> int:
        """What the counters must contain of it."""
        return self.used if self.is_settled else max(self.tokens, self.used)

    @property
    def must_run(self) -> bool:
        return self.ended is None and not self.is_settled

    @property
    def is_deferred(self) -> bool:
        """Whether no client waits for it; only who runs it knows its end."""
        return self.parts == 0

    @property
    def subjects(self) -> list[str]:
        return [key_subject(self.key)] * bool(self.key) + [tenant_subject(self.tenant)] * bool(self.tenant)


def key_subject(key_id: str) -> str:
    return f"key {key_id}"


def tenant_subject(name: str) -> str:
    return f"tenant {name}"


def settle(t: Transaction, reservations: Iterable[Reservation]) -> None:
    """Bring the counters to what is now known of requests, and write both."""
    changed = list(reservations)
    if not changed:
        return
    counters = read_counters(t, {subject for one in changed for subject in one.subjects})
    touched: dict[str, Counter] = {}
    for one in changed:
        tokens, running = one.owed - one.charged, int(one.must_run) - int(one.is_running)
        one.charged, one.is_running = one.owed, one.must_run
        for subject in one.subjects if tokens or running else ():
            counters[subject].change(tokens, day_of(one.began), running)
            touched[subject] = counters[subject]
    write_counters(t, touched.values())
    write(t, changed)


def read(t: Transaction, request_ids: Collection[str]) -> dict[str, Reservation]:
    """Return the reservations that there are; a request without limits has none."""
    rows = in_list(t, f"SELECT {_RESERVATION} FROM gateway_reservations WHERE request_id IN", request_ids)
    return {str(row[0]): _reservation(row) for row in rows}


def unsettled(
    t: Transaction, began_before: float, ended_before: float, gateway: str | None, most: int
) -> list[Reservation]:
    """Return some that began or ended before a time, of one gateway or all."""
    where, values = ("AND gateway = ?", (gateway,)) if gateway is not None else ("", ())
    rows = t.all(
        f"SELECT {_RESERVATION} FROM gateway_reservations WHERE is_open = 1"
        f" AND (began < ? OR ended < ?) {where} ORDER BY began LIMIT ?",
        *(began_before, ended_before, *values, most),
    )
    return [_reservation(row) for row in rows]


def _reservation(row: Row) -> Reservation:
    found = Reservation(*row)
    found.is_released, found.is_running = bool(found.is_released), bool(found.is_running)
    return found


def write(t: Transaction, reservations: Iterable[Reservation]) -> None:
    rows = [
        (
            *(one.request_id, one.key, one.tenant, one.gateway, one.tokens, one.parts, one.began),
            *(one.used, one.finals, one.ended, int(one.is_released), one.charged, int(one.is_running)),
            int(not one.is_settled),
        )
        for one in reservations
    ]
    if rows:
        t.many(_WRITE_RESERVATION, rows)


def read_counters(t: Transaction, subjects: Collection[str]) -> dict[str, Counter]:
    """Return a counter for each subject, also for one that has no row yet."""
    rows = in_list(t, f"SELECT {_COUNTER} FROM gateway_counters WHERE subject IN", subjects)
    found = {str(row[0]): Counter(*row) for row in rows}
    return {subject: found.get(subject) or Counter(subject) for subject in subjects}


def write_counters(t: Transaction, counters: Collection[Counter]) -> None:
    if counters:
        t.many(
            _WRITE_COUNTER,
            [
                (one.subject, one.requests, one.tokens, one.updated, one.day, one.day_tokens, one.running)
                for one in counters
            ],
        )


_WRITE_COUNTER = (
    f"INSERT INTO gateway_counters ({_COUNTER}) VALUES (?,?,?,?,?,?,?) ON CONFLICT (subject) DO UPDATE SET"
    " requests = excluded.requests, tokens = excluded.tokens, updated = excluded.updated, day = excluded.day,"
    " day_tokens = excluded.day_tokens, running = excluded.running"
)
_WRITE_RESERVATION = (
    f"INSERT INTO gateway_reservations ({_RESERVATION}, is_open) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
    " ON CONFLICT (request_id) DO UPDATE SET gateway = excluded.gateway, tokens = excluded.tokens,"
    " parts = excluded.parts, began = excluded.began, used = excluded.used, finals = excluded.finals,"
    " ended = excluded.ended, is_released = excluded.is_released, charged = excluded.charged,"
    " is_running = excluded.is_running, is_open = excluded.is_open"
)
