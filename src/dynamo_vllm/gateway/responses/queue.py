"""Hands out background responses that wait, to one gateway at a time.

A response waits as `queued`; its `beat` is then the time before which nobody tries it: a gateway that asks
whether it may start, or limits that do not allow it yet. While it runs, `beat` is when its gateway last said
so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.connections import shared_clock
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses.store import ENDED, FIELDS, Kept, kept_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.gateway.database import Transaction

    Clock = Callable[[Transaction], float]

QUEUED_PER_TENANT = 1000
ROWS_PER_TENANT = 32
"""Looked at together: many of one tenant hide none of another."""
MOST_ROWS = 1000
LONGEST_HOLD_SECONDS = 60.0
"""Limits may have been changed meanwhile. A longer hold is from a clock that was wrong."""
_IS_DUE = """
    ((status = 'queued' AND (beat <= ? OR beat > ?)) OR (status = 'in_progress' AND (beat < ? OR beat > ?)))
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A response that may be started."""

    id: str
    tenant: str
    created: float
    key_id: str
    """Empty for one that an earlier version queued."""


class ResponseQueue:
    """The work on the table; each method runs in a transaction."""

    def __init__(self, stale_seconds: float, clock: Clock = shared_clock) -> None:
        self._stale_seconds = stale_seconds
        self._now = clock

    def refuse_too_many(self, t: Transaction, tenant: str) -> None:
        """Raise GatewayError if no more of this tenant may wait."""
        row = t.one("SELECT COUNT(*) FROM gateway_responses WHERE status = 'queued' AND tenant = ?", tenant)
        if row is not None and int(row[0]) >= QUEUED_PER_TENANT:
            raise GatewayError(
                429,
                f"{row[0]} background responses are queued; wait until some have run, or cancel some",
                code="too_many_queued_responses",
                headers={"retry-after": "10"},
            )

    def waiting(self, t: Transaction) -> list[Waiting]:
        """Return what nobody runs, the first one of each tenant first.

        What was held goes behind what has not been tried since, so that a key whose limits allow nothing
        hides no other key of its tenant.
        """
        rows = t.all(
            "SELECT r.id, r.tenant, r.created, r.headers FROM (SELECT id, created, ROW_NUMBER() OVER"
            " (PARTITION BY tenant ORDER BY beat, created, id) AS place FROM gateway_responses"
            f" WHERE {_IS_DUE}) w JOIN gateway_responses r ON r.id = w.id"
            " WHERE w.place <= ? ORDER BY w.place, w.created LIMIT ?",
            *self._due(t),
            ROWS_PER_TENANT,
            MOST_ROWS,
        )
        return [
            Waiting(str(response_id), str(tenant), float(created), headers_of(headers).get(identity.KEY, ""))
            for response_id, tenant, created, headers in rows
        ]

    def lease(self, t: Transaction, response_id: str, owner: str) -> Kept | None:
        """Return a response that nobody else starts for now; None if another gateway was faster."""
        now = self._now(t)
        changed = t.execute(
            "UPDATE gateway_responses SET owner = ?, beat = CASE WHEN status = 'queued' THEN ? ELSE ? END"
            f" WHERE id = ? AND {_IS_DUE}",
            owner,
            now + self._stale_seconds,
            now,
            response_id,
            *self._due(t),
        )
        row = t.one(f"SELECT {FIELDS} FROM gateway_responses WHERE id = ?", response_id)
        return kept_of(row) if changed and row is not None else None

    def begin(self, t: Transaction, response_id: str, owner: str) -> int | None:
        """Return how often the response was started; None if it is not ours to run any more."""
        changed = t.execute(
            "UPDATE gateway_responses SET status = 'in_progress', beat = ?, starts = starts + 1"
            " WHERE id = ? AND owner = ? AND status IN ('queued', 'in_progress')",
            self._now(t),
            response_id,
            owner,
        )
        row = t.one("SELECT starts FROM gateway_responses WHERE id = ?", response_id)
        return int(row[0]) if changed and row is not None else None

    def hold(self, t: Transaction, response_id: str, owner: str, seconds: float) -> None:
        """Let a leased response wait for so long."""
        t.execute(
            "UPDATE gateway_responses SET status = 'queued', owner = NULL, beat = ?"
            " WHERE id = ? AND owner = ? AND status IN ('queued', 'in_progress')",
            self._now(t) + min(seconds, LONGEST_HOLD_SECONDS),
            response_id,
            owner,
        )

    def hold_all(self, t: Transaction, ids: Sequence[str], seconds: float) -> None:
        """Let responses that nobody has leased wait for so long."""
        until = self._now(t) + min(seconds, LONGEST_HOLD_SECONDS)
        t.many(
            "UPDATE gateway_responses SET status = 'queued', owner = NULL, beat = ?"
            f" WHERE id = ? AND {_IS_DUE}",
            [(until, response_id, *self._due(t)) for response_id in ids],
        )

    def beat(self, t: Transaction, response_id: str, owner: str) -> bool:
        """Say that we still run it; return whether it is still ours, and not cancelled."""
        return bool(
            t.execute(
                "UPDATE gateway_responses SET beat = ? WHERE id = ? AND owner = ? AND status = 'in_progress'",
                self._now(t),
                response_id,
                owner,
            )
        )

    def is_open(self, t: Transaction, response_id: str, owner: str | None) -> bool:
        """Return whether a response has not ended, and belongs to this owner if there is one."""
        row = t.one("SELECT status, owner FROM gateway_responses WHERE id = ?", response_id)
        return row is not None and row[0] not in ENDED and owner in (None, row[1])

    def _due(self, t: Transaction) -> tuple[float, float, float, float]:
        now = self._now(t)
        future = now + 2 * LONGEST_HOLD_SECONDS
        return now, future, now - self._stale_seconds, future


def headers_of(text: str | None) -> dict[str, str]:
    """Return the headers that a response is sent with, and those that say whose it is."""
    return msgspec.json.decode(text or "{}", type=dict[str, str])
