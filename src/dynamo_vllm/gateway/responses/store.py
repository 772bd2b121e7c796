"""Keeps responses: what each was asked, what it answered, and which one it follows.

A response keeps only its own input and output; those of the responses before it are found along `previous`. A
response that another one follows stays after its time until the last follower's has come, but cannot be
retrieved any more. One that the client deletes is gone at once, and its followers can no longer be continued.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_vllm.gateway import kept
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses.items import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.gateway.database import Row, Transaction

KIND = "responses"
ENDED = ("completed", "incomplete", "failed", "cancelled")
DAY_SECONDS = 86400.0
SWEPT_TOGETHER = 500
LONGEST_CHAIN = 10_000
_FIELDS = "id, tenant, previous, status, background, body, request, headers, owner, starts"
_CHAIN = f"""
    WITH RECURSIVE chain (id, previous, depth) AS (
        SELECT id, previous, 0 FROM gateway_responses WHERE id = ?
        UNION ALL
        SELECT r.id, r.previous, c.depth + 1
        FROM gateway_responses r JOIN chain c ON r.id = c.previous WHERE c.depth < {LONGEST_CHAIN}
    )
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as it is kept; its body has no output."""

    id: str
    tenant: str
    previous: str | None
    status: str
    is_background: bool
    body: str
    request: str | None
    headers: str | None
    owner: str | None
    starts: int
    output: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class New:
    """A response that is to be kept."""

    id: str
    tenant: str
    previous: str | None
    status: str
    body: str
    given: Sequence[Item]
    made: Sequence[Item] = ()
    is_background: bool = False
    request: str | None = None
    headers: str | None = None


class ResponseStore:
    """The work on the tables; each method runs in a transaction."""

    def __init__(self, days: float, tenant_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._seconds = days * DAY_SECONDS
        self._tenant_bytes = tenant_bytes
        self._now = clock

    def refuse_too_large(self, items: Sequence[Item]) -> None:
        """Raise GatewayError for an input that could not be kept."""
        if sum(len(item.body) for item in items) > self._tenant_bytes:
            raise GatewayError(
                413,
                f"the input is longer than the {self._tenant_bytes} bytes that are kept; send store: false",
                parameter="store",
            )

    def keep(self, t: Transaction, new: New) -> None:
        now = self._now()
        size = len(new.body) + len(new.request or "")
        t.execute(
            "INSERT INTO gateway_responses (id, tenant, previous, created, expires, status, background,"
            " body, bytes, request, headers, owner, beat, starts)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, NULL, 0, 0)",
            new.id,
            new.tenant,
            new.previous,
            now,
            now + self._seconds,
            new.status,
            int(new.is_background),
            new.body,
            new.request,
            new.headers,
        )
        size += self._add_items(t, new.id, new.given, 0, is_output=False)
        size += self._add_items(t, new.id, new.made, len(new.given), is_output=True)
        self._count(t, new.id, new.tenant, size)

    def finish(self, t: Transaction, response: Kept, status: str, body: str, made: Sequence[Item]) -> None:
        """Write down the answer of a background response."""
        (first,) = t.one("SELECT COUNT(*) FROM gateway_response_items WHERE response = ?", response.id) or (
            0,
        )
        t.execute(
            "UPDATE gateway_responses SET status = ?, body = ?, request = NULL, headers = NULL, owner = NULL"
            " WHERE id = ?",
            status,
            body,
            response.id,
        )
        size = len(body) - len(response.body) - len(response.request or "")
        size += self._add_items(t, response.id, made, int(first), is_output=True)
        self._count(t, response.id, response.tenant, size)

    def get(self, t: Transaction, response_id: str, tenant: str) -> Kept | None:
        """Return a response of this tenant with its output."""
        found = self._row(t, response_id, tenant)
        if found is None:
            return None
        rows = t.all(
            "SELECT body FROM gateway_response_items WHERE response = ? AND is_output = 1 ORDER BY position",
            response_id,
        )
        return _kept(found, [str(body) for (body,) in rows])

    def history(self, t: Transaction, response_id: str, tenant: str) -> list[str]:
        """Return the items of a response and of all before it; raise GatewayError if one is missing."""
        found = self._row(t, response_id, tenant)
        if found is None:
            raise not_found(response_id)
        status = _kept(found).status
        if status not in ("completed", "incomplete"):
            raise GatewayError(400, f"response {response_id!r} is {status}", parameter="previous_response_id")
        beginning = t.one(f"{_CHAIN} SELECT previous FROM chain ORDER BY depth DESC LIMIT 1", response_id)
        if beginning is not None and beginning[0] is not None:
            raise not_found(str(beginning[0]), " (an earlier one of this conversation)")
        rows = t.all(
            f"{_CHAIN} SELECT i.body FROM chain c JOIN gateway_response_items i ON i.response = c.id"
            " ORDER BY c.depth DESC, i.position",
            response_id,
        )
        return [str(body) for (body,) in rows]

    def resolved(self, t: Transaction, items: Sequence[Item], tenant: str) -> list[Item]:
        """Replace references by what they stand for."""
        return [item if item.reference is None else self._referred(t, item, tenant) for item in items]

    def inputs(
        self, t: Transaction, response_id: str, tenant: str, order: str, after: str | None, limit: int
    ) -> tuple[list[tuple[str, str]], bool]:
        """Return ids and bodies of the input, and whether there are more."""
        if self._row(t, response_id, tenant) is None:
            raise absent(response_id)
        rows = [
            (str(item_id), str(body))
            for item_id, body in t.all(
                f"{_CHAIN} SELECT i.id, i.body FROM chain c JOIN gateway_response_items i"
                " ON i.response = c.id WHERE c.depth > 0 OR i.is_output = 0"
                " ORDER BY c.depth DESC, i.position",
                response_id,
            )
        ]
        if order == "desc":
            rows.reverse()
        if after is not None:
            ids = [item_id for item_id, _ in rows]
            if after not in ids:
                raise GatewayError(400, f"there is no item {after!r}", parameter="after")
            rows = rows[ids.index(after) + 1 :]
        return rows[:limit], len(rows) > limit

    def delete(self, t: Transaction, response_id: str, tenant: str) -> None:
        if self._row(t, response_id, tenant) is None:
            raise absent(response_id)
        self._drop(t, [response_id])

    def in_background(self, t: Transaction, response_id: str, tenant: str) -> Kept:
        """Return a response that can be cancelled; raise GatewayError for another one."""
        found = self.get(t, response_id, tenant)
        if found is None:
            raise absent(response_id)
        if not found.is_background:
            raise GatewayError(400, "only a response made with background: true can be cancelled")
        return found

    def sweep(self, t: Transaction) -> int:
        """Forget responses whose time has come, some at a time; return how many."""
        rows = t.all(
            "SELECT id FROM gateway_responses r WHERE expires < ? AND NOT EXISTS"
            " (SELECT 1 FROM gateway_responses f WHERE f.previous = r.id) LIMIT ?",
            self._now(),
            SWEPT_TOGETHER,
        )
        self._drop(t, [str(response_id) for (response_id,) in rows])
        return len(rows)

    def waiting(self, t: Transaction, stale_seconds: float, limit: int) -> list[str]:
        """Return background responses that nobody runs."""
        rows = t.all(
            "SELECT id FROM gateway_responses WHERE status = 'queued'"
            " OR (status = 'in_progress' AND beat < ?) ORDER BY created LIMIT ?",
            self._now() - stale_seconds,
            limit,
        )
        return [str(response_id) for (response_id,) in rows]

    def claim(self, t: Transaction, response_id: str, owner: str, stale_seconds: float) -> Kept | None:
        """Return a response that is ours to run from now on; None if another gateway was faster."""
        now = self._now()
        changed = t.execute(
            "UPDATE gateway_responses SET status = 'in_progress', owner = ?, beat = ?, starts = starts + 1"
            " WHERE id = ? AND (status = 'queued' OR (status = 'in_progress' AND beat < ?))",
            owner,
            now,
            response_id,
            now - stale_seconds,
        )
        found = t.one(f"SELECT {_FIELDS} FROM gateway_responses WHERE id = ?", response_id)
        return _kept(found) if changed and found is not None else None

    def beat(self, t: Transaction, response_id: str, owner: str) -> bool:
        """Say that we still run it; return whether it is still ours, and not cancelled."""
        return bool(
            t.execute(
                "UPDATE gateway_responses SET beat = ? WHERE id = ? AND owner = ? AND status = 'in_progress'",
                self._now(),
                response_id,
                owner,
            )
        )

    def given(self, t: Transaction, response_id: str) -> list[str]:
        """Return the response's own input."""
        rows = t.all(
            "SELECT body FROM gateway_response_items WHERE response = ? AND is_output = 0 ORDER BY position",
            response_id,
        )
        return [str(body) for (body,) in rows]

    def _row(self, t: Transaction, response_id: str, tenant: str) -> Row | None:
        return t.one(
            f"SELECT {_FIELDS} FROM gateway_responses WHERE id = ? AND tenant = ? AND expires > ?",
            response_id,
            tenant,
            self._now(),
        )

    def _referred(self, t: Transaction, item: Item, tenant: str) -> Item:
        found = t.one(
            "SELECT i.body FROM gateway_response_items i JOIN gateway_responses r ON r.id = i.response"
            " WHERE i.id = ? AND r.tenant = ? LIMIT 1",
            item.reference,
            tenant,
        )
        if found is None:
            raise GatewayError(
                404,
                f"item {item.reference!r} is not kept; send the item itself",
                code="item_not_found",
                parameter="input",
            )
        return Item(item.id, str(found[0]))

    def _add_items(
        self, t: Transaction, response_id: str, items: Sequence[Item], first: int, *, is_output: bool
    ) -> int:
        for position, item in enumerate(items, first):
            t.execute(
                "INSERT INTO gateway_response_items (response, position, id, is_output, body)"
                " VALUES (?, ?, ?, ?, ?)",
                response_id,
                position,
                item.id,
                int(is_output),
                item.body,
            )
        return sum(len(item.body) for item in items)

    def _count(self, t: Transaction, response_id: str, tenant: str, size: int) -> None:
        t.execute("UPDATE gateway_responses SET bytes = bytes + ? WHERE id = ?", size, response_id)
        over = kept.add(t, tenant, KIND, size) - self._tenant_bytes
        while over > 0:
            rows = t.all(
                "SELECT id, bytes FROM gateway_responses WHERE tenant = ? AND id <> ?"
                " AND status NOT IN ('queued', 'in_progress') ORDER BY created LIMIT 20",
                tenant,
                response_id,
            )
            if not rows:
                return
            oldest = []
            for older, older_size in rows:
                oldest.append(str(older))
                over -= int(older_size)
                if over <= 0:
                    break
            self._drop(t, oldest)

    def _drop(self, t: Transaction, ids: Sequence[str]) -> None:
        for response_id in ids:
            found = t.one("SELECT tenant, bytes FROM gateway_responses WHERE id = ?", response_id)
            if found is not None:
                kept.add(t, str(found[0]), KIND, -int(found[1]))
            t.execute("DELETE FROM gateway_response_items WHERE response = ?", response_id)
            t.execute("DELETE FROM gateway_responses WHERE id = ?", response_id)


def absent(response_id: str) -> GatewayError:
    return GatewayError(404, f"response {response_id!r} is not kept here", code="not_found")


def not_found(response_id: str, which: str = "") -> GatewayError:
    """The status and the code are OpenAI's: clients send the whole conversation again when they see them."""
    return GatewayError(
        400,
        f"Previous response with id {response_id!r} not found{which}.",
        code="previous_response_not_found",
        parameter="previous_response_id",
    )


def _kept(row: Row, output: list[str] | None = None) -> Kept:
    response_id, tenant, previous, status, background, body, request, headers, owner, starts = row
    return Kept(
        id=response_id,
        tenant=tenant,
        previous=previous,
        status=status,
        is_background=bool(background),
        body=body,
        request=request,
        headers=headers,
        owner=owner,
        starts=int(starts),
        output=output or [],
    )
