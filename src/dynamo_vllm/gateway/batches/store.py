"""Keeps batches: their states, who runs them, and which of their lines are answered."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.gateway.batches.files import ACTIVE
from dynamo_vllm.gateway.connections import shared_clock
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.gateway.batches.lines import Fault
    from dynamo_vllm.gateway.database import Row, Transaction

    Clock = Callable[[Transaction], float]

_FIELDS = (
    "id, tenant, key_id, endpoint, file_id, completion_window, metadata, status, created,"
    " expires, started, finalizing, cancelling, ended, errors, total, completed, failed, input_tokens,"
    " cached_tokens, output_tokens, reasoning_tokens, output_file, error_file, owner, beat"
)
RUNNABLE = "('validating', 'in_progress')"
OVER = "('cancelling', 'finalizing')"
MOST_OVER = 64
MOST_BATCHES = 10_000
"""Of a tenant, with those that have ended."""
FORGOTTEN_TOGETHER = 100
TENANTS_TOGETHER = 100
"""In one statement."""
ENDED = ("completed", "failed", "expired", "cancelled")
_IDLE = "(owner IS NULL OR beat < ? OR beat > ?)"
"""A beat that is far ahead is of a clock that was wrong."""
_TENANTS = """
    WITH RECURSIVE tenants (name) AS (
        SELECT MIN(tenant) FROM gateway_batches WHERE ended IS NULL
        UNION ALL
        SELECT (SELECT MIN(tenant) FROM gateway_batches WHERE ended IS NULL AND tenant > name)
        FROM tenants WHERE name IS NOT NULL
    ) SELECT name FROM tenants WHERE name IS NOT NULL
"""
"""Steps from tenant to tenant in the index, so that a tenant with many batches costs no more than others."""
_OF_TENANT = f"""
    SELECT * FROM (
        SELECT id, tenant, file_id, beat, created FROM gateway_batches
        WHERE tenant = ? AND ended IS NULL AND status IN {RUNNABLE} AND {_IDLE}
        ORDER BY beat, created, id LIMIT ?
    ) AS idle
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """A row of the table."""

    id: str
    tenant: str
    key_id: str
    endpoint: str
    file_id: str
    completion_window: str
    metadata: str | None
    status: str
    created: float
    expires: float
    started: float | None
    finalizing: float | None
    cancelling: float | None
    ended: float | None
    errors: str | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    output_file: str | None
    error_file: str | None
    owner: str | None
    beat: float

    def shown(self) -> dict[str, Any]:
        """Return it in OpenAI's shape."""
        errors = None
        if self.errors is not None:
            errors = {"object": "list", "data": msgspec.json.decode(self.errors)}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": int(self.created),
            "in_progress_at": _second(self.started),
            "expires_at": int(self.expires),
            "finalizing_at": _second(self.finalizing),
            "cancelling_at": _second(self.cancelling),
            **{f"{s}_at": _second(self.ended) if s == self.status else None for s in ENDED},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": None if self.metadata is None else msgspec.json.decode(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """A batch that nobody runs."""

    id: str
    tenant: str
    file_id: str
    is_over: bool
    """Whether it has been cancelled or its time has ended: only its files are to be written."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a line's answer is, and what it cost."""

    number: int
    start: int
    length: int
    is_error: bool
    tokens: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Of the prompt, of it cached, of the answer, of it thoughts."""


class BatchStore:
    """The work on the tables; each method runs in a transaction.

    A gateway runs a batch as long as the row names it and it says so often enough. Everything that it writes
    down asks for that in the same transaction, so that one which was away for too long changes nothing.
    """

    def __init__(self, stale_seconds: float, clock: Clock = shared_clock) -> None:
        self._stale_seconds = stale_seconds
        self._now = clock

    def create(
        self,
        t: Transaction,
        *,
        tenant: str,
        key_id: str,
        endpoint: str,
        file_id: str,
        window: tuple[str, float],
        metadata: str | None,
    ) -> Batch:
        """Keep a new batch; the tenant's oldest that has ended makes room if there are too many."""
        self._make_room(t, tenant)
        batch_id, now = f"batch_{secrets.token_hex(12)}", self._now(t)
        t.execute(
            "INSERT INTO gateway_batches (id, tenant, key_id, endpoint, file_id,"
            " completion_window, metadata, status, created, expires, total, completed, failed,"
            " input_tokens, cached_tokens, output_tokens, reasoning_tokens, beat)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?, 0, 0, 0, 0, 0, 0, 0, 0)",
            batch_id,
            tenant,
            key_id,
            endpoint,
            file_id,
            window[0],
            metadata,
            now,
            now + window[1],
        )
        return self.get(t, batch_id, tenant)

    def _make_room(self, t: Transaction, tenant: str) -> None:
        row = t.one("SELECT COUNT(*) FROM gateway_batches WHERE tenant = ?", tenant)
        over = 1 - MOST_BATCHES + (0 if row is None else int(row[0]))
        if over <= 0:
            return
        oldest = t.all(
            "SELECT id FROM gateway_batches WHERE tenant = ? AND ended IS NOT NULL ORDER BY created LIMIT ?",
            tenant,
            over,
        )
        if len(oldest) < over:
            message = f"the tenant has {MOST_BATCHES} batches that have not ended; cancel some, or wait"
            raise GatewayError(400, message, code="too_many_batches")
        _forget(t, oldest)

    def forget(self, t: Transaction, seconds: float) -> list[str]:
        """Forget some batches that ended so long ago; return them."""
        rows = t.all(
            "SELECT id FROM gateway_batches WHERE ended < ? ORDER BY ended LIMIT ?",
            self._now(t) - seconds,
            FORGOTTEN_TOGETHER,
        )
        _forget(t, rows)
        return [str(batch_id) for (batch_id,) in rows]

    def is_active(self, t: Transaction, batch_id: str) -> bool:
        return t.one("SELECT 1 FROM gateway_batches WHERE id = ? AND ended IS NULL", batch_id) is not None

    def get(self, t: Transaction, batch_id: str, tenant: str) -> Batch:
        sql = f"SELECT {_FIELDS} FROM gateway_batches WHERE id = ? AND tenant = ?"
        row = None if "\0" in batch_id else t.one(sql, batch_id, tenant)
        if row is None:
            raise GatewayError(404, f"there is no batch {batch_id!r}", code="not_found")
        return _batch(row)

    def listed(self, t: Transaction, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """Return some batches after one of them, newest first, and one more if there are more."""
        where, values = "tenant = ?", [tenant]
        if after is not None:
            last = self.get(t, after, tenant)
            where, values = f"{where} AND (created, id) < (?, ?)", [tenant, last.created, last.id]  # type: ignore[list-item]
        rows = t.all(
            f"SELECT {_FIELDS} FROM gateway_batches WHERE {where} ORDER BY created DESC, id DESC LIMIT ?",
            *values,
            limit + 1,
        )
        return [_batch(row) for row in rows]

    def cancel(self, t: Transaction, batch_id: str, tenant: str) -> Batch:
        """Ask whoever runs it to stop; raise GatewayError if it has ended."""
        changed = t.execute(
            "UPDATE gateway_batches SET status = 'cancelling', cancelling = ? WHERE id = ? AND tenant = ?"
            " AND status IN ('validating', 'in_progress')",
            self._now(t),
            batch_id,
            tenant,
        )
        found = self.get(t, batch_id, tenant)
        if not changed and found.status not in ("cancelling", "cancelled"):
            raise GatewayError(409, f"a batch that is {found.status} cannot be cancelled")
        return found

    def waiting(self, t: Transaction, each: int) -> list[WaitingBatch]:
        """Return batches that nobody runs, the next one first: those that are over, then some of each tenant.

        Both begin with one of each tenant. What did not run for the longest time is next. No tenant hides
        another's, however many it has.
        """
        now = self._now(t)
        stale = now - self._stale_seconds, now + self._stale_seconds
        t.execute(
            "UPDATE gateway_batches SET status = 'finalizing' WHERE ended IS NULL AND expires < ?"
            f" AND status NOT IN {OVER} AND {_IDLE}",  # an index on the status would be read whole
            now,
            *stale,
        )
        over = t.all(
            "SELECT id, tenant, file_id FROM (SELECT id, tenant, file_id, beat, ROW_NUMBER() OVER"
            " (PARTITION BY tenant ORDER BY beat, created, id) AS place FROM gateway_batches"
            f" WHERE status IN {OVER} AND {_IDLE}) AS over_ones ORDER BY place, beat LIMIT ?",
            *stale,
            MOST_OVER,
        )
        tenants = [name for (name,) in t.all(_TENANTS)]
        rows: list[Row] = []
        for start in range(0, len(tenants), TENANTS_TOGETHER):
            some = tenants[start : start + TENANTS_TOGETHER]
            values = [value for tenant in some for value in (tenant, *stale, each)]
            rows += t.all(" UNION ALL ".join([_OF_TENANT] * len(some)), *values)
        places: Counter[str] = Counter()
        order = []
        for batch_id, tenant, file_id, beat, created in sorted(rows, key=lambda row: row[3:]):
            places[tenant] += 1
            batch = WaitingBatch(batch_id, tenant, file_id, is_over=False)
            order.append((places[tenant], beat, created, batch))
        order.sort(key=lambda entry: entry[:3])
        ending = [WaitingBatch(batch_id, tenant, file_id, is_over=True) for batch_id, tenant, file_id in over]
        return ending + [entry[3] for entry in order]

    def claim(self, t: Transaction, batch_id: str, owner: str) -> Batch | None:
        """Return a batch that is ours to run from now on; None if another gateway was faster."""
        now = self._now(t)
        changed = t.execute(
            f"UPDATE gateway_batches SET owner = ?, beat = ? WHERE id = ? AND status IN {ACTIVE} AND {_IDLE}",
            owner,
            now,
            batch_id,
            now - self._stale_seconds,
            now + self._stale_seconds,
        )
        return self.mine(t, batch_id, owner) if changed else None

    def release(self, t: Transaction, batch_id: str, owner: str) -> None:
        """Let another gateway go on with it at once."""
        t.execute("UPDATE gateway_batches SET owner = NULL WHERE id = ? AND owner = ?", batch_id, owner)

    def mine(self, t: Transaction, batch_id: str, owner: str) -> Batch | None:
        """Say that we still run it, and return it; None if another gateway does."""
        changed = t.execute(
            f"UPDATE gateway_batches SET beat = ? WHERE id = ? AND owner = ? AND status IN {ACTIVE}",
            self._now(t),
            batch_id,
            owner,
        )
        row = t.one(f"SELECT {_FIELDS} FROM gateway_batches WHERE id = ?", batch_id)
        return _batch(row) if changed and row is not None else None

    def checked(self, t: Transaction, batch_id: str, owner: str, total: int, faults: Sequence[Fault]) -> None:
        """Write down how the check ended: without faults the batch may run."""
        batch = self.mine(t, batch_id, owner)
        if batch is None or batch.status != "validating":
            return
        if faults:
            t.execute(
                "UPDATE gateway_batches SET status = 'failed', errors = ?, ended = ?, total = ?,"
                " owner = NULL WHERE id = ?",
                msgspec.json.encode(faults).decode(),
                self._now(t),
                total,
                batch_id,
            )
            return
        t.execute(
            "UPDATE gateway_batches SET status = 'in_progress', started = ?, total = ? WHERE id = ?",
            self._now(t),
            total,
            batch_id,
        )

    def note_failure(self, t: Transaction, batch_id: str, reason: str) -> int:
        """Count a run that failed; return how many did."""
        t.execute(
            "INSERT INTO gateway_batch_failures (batch, runs, reason) VALUES (?, 1, ?) ON CONFLICT (batch)"
            " DO UPDATE SET runs = gateway_batch_failures.runs + 1, reason = excluded.reason",
            batch_id,
            reason,
        )
        return self.failures(t, batch_id)[0]

    def failures(self, t: Transaction, batch_id: str) -> tuple[int, str]:
        """Return how many runs failed, and why the last one did."""
        row = t.one("SELECT runs, reason FROM gateway_batch_failures WHERE batch = ?", batch_id)
        return (0, "") if row is None else (int(row[0]), str(row[1]))

    def answered(self, t: Transaction, batch_id: str) -> list[tuple[int, str, int, int, bool]]:
        """Return number, part, start, length and kind of every answered line, in order."""
        rows = t.all(
            "SELECT number, part, start, length, is_error FROM gateway_batch_lines WHERE batch = ?"
            " ORDER BY number",
            batch_id,
        )
        return [(int(n), str(p), int(s), int(size), bool(e)) for n, p, s, size, e in rows]

    def add(self, t: Transaction, batch_id: str, owner: str, answers: Sequence[Answer]) -> Batch | None:
        """Write down answers that are in our part; return the batch, None if it is not ours any more."""
        batch = self.mine(t, batch_id, owner)
        if batch is None or not answers:
            return batch
        answers = [answer for answer in answers if self._insert(t, batch_id, owner, answer)]
        if not answers:
            return batch
        failed = sum(answer.is_error for answer in answers)
        tokens = [sum(column) for column in zip(*(answer.tokens for answer in answers), strict=True)]
        t.execute(
            "UPDATE gateway_batches SET completed = completed + ?, failed = failed + ?,"
            " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?,"
            " output_tokens = output_tokens + ?, reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
            len(answers) - failed,
            failed,
            *tokens,
            batch_id,
        )
        return batch

    def _insert(self, t: Transaction, batch_id: str, owner: str, answer: Answer) -> bool:
        """Return whether it is new: a transaction whose end nobody heard of runs again."""
        return bool(
            t.execute(
                "INSERT INTO gateway_batch_lines (batch, number, part, start, length, is_error)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (batch, number) DO NOTHING",
                batch_id,
                answer.number,
                owner,
                answer.start,
                answer.length,
                int(answer.is_error),
            )
        )

    def lose(self, t: Transaction, batch_id: str, lost: Sequence[tuple[int, bool]]) -> None:
        """Forget answers that are not on the disk: the machine lost its power."""
        for number, is_error in lost:
            t.execute("DELETE FROM gateway_batch_lines WHERE batch = ? AND number = ?", batch_id, number)
            column = "failed" if is_error else "completed"
            t.execute(f"UPDATE gateway_batches SET {column} = {column} - 1 WHERE id = ?", batch_id)

    def finalize(self, t: Transaction, batch_id: str, owner: str) -> Batch | None:
        """Say that the files are being written."""
        t.execute(
            "UPDATE gateway_batches SET finalizing = ?, status = CASE WHEN status = 'in_progress'"
            " THEN 'finalizing' ELSE status END WHERE id = ? AND owner = ?",
            self._now(t),
            batch_id,
            owner,
        )
        return self.mine(t, batch_id, owner)

    def end(
        self,
        t: Transaction,
        batch: Batch,
        owner: str,
        status: str,
        unanswered: int = 0,
        files: Sequence[str | None] = (None, None),
        fault: Fault | None = None,
    ) -> bool:
        """Write down the last state; return whether the batch was still ours."""
        changed = t.execute(
            "UPDATE gateway_batches SET status = ?, ended = ?, failed = failed + ?, output_file = ?,"
            f" error_file = ?, errors = ?, owner = NULL WHERE id = ? AND owner = ? AND status IN {ACTIVE}",
            status,
            self._now(t),
            unanswered,
            *files,
            None if fault is None else msgspec.json.encode([fault]).decode(),
            batch.id,
            owner,
        )
        if changed:
            t.execute("DELETE FROM gateway_batch_lines WHERE batch = ?", batch.id)
            t.execute("DELETE FROM gateway_batch_failures WHERE batch = ?", batch.id)
        return bool(changed)


def _forget(t: Transaction, rows: Sequence[Row]) -> None:
    t.many("DELETE FROM gateway_batches WHERE id = ?", rows)


def _second(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


def _batch(row: Row) -> Batch:
    return Batch(*row)
