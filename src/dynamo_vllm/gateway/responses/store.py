"""Keeps responses: what each was asked, what it answered, and which one it follows.

A response keeps only its own input and output; those of the responses before it are found along `previous`. A
response that another one follows, or names an item of, stays after its time until the last follower's has
come, but cannot be retrieved any more. One that the client deletes is gone at once, and its followers can no
longer be continued.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_vllm.gateway import kept
from dynamo_vllm.gateway.connections import shared_clock
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses import history

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dynamo_vllm.gateway.database import Row, Transaction
    from dynamo_vllm.gateway.responses.items import Item

    Clock = Callable[[Transaction], float]

KIND = "responses"
ENDED = ("completed", "incomplete", "failed", "cancelled")
DAY_SECONDS = 86400.0
SWEPT_TOGETHER = 500
"""In one transaction, which others wait for."""
RESPONSE_BYTES = 512
ITEM_BYTES = 256
"""What a row takes beside its text, with its ids in the indexes."""
FIELDS = "id, tenant, previous, status, background, body, request, headers, owner, starts"
_BESIDE = (
    "gateway_response_item_names",
    "gateway_response_references",
    "gateway_response_sizes",
    "gateway_response_items",
)
"""Tables with rows of each response."""


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
    output: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Name:
    """An item that later requests can name."""

    id: str
    position: int
    bytes: int


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

    @property
    def bytes(self) -> int:
        """What it takes of the tenant's room."""
        size = RESPONSE_BYTES + sum(map(_text_bytes, (self.body, self.request, self.headers)))
        return size + sum(map(_stored_bytes, (*self.given, *self.made)))


class ResponseStore:
    """The work on the tables; each method runs in a transaction."""

    def __init__(self, days: float, tenant_bytes: int, clock: Clock = shared_clock) -> None:
        self._seconds = days * DAY_SECONDS
        self._tenant_bytes = tenant_bytes
        self._now = clock

    def resolved(
        self, t: Transaction, items: Sequence[Item], previous: str | None, tenant: str
    ) -> list[Item]:
        """Return the items with the origins of references.

        Raise GatewayError if something is missing, or if all of it with the history is too long.
        """
        if previous is not None:
            self._refuse_unanswered(t, previous, tenant)
        items = history.resolved(t, items, tenant, self._now(t))
        history.refuse_too_long(t, previous, items)
        return items

    def refuse_too_large(self, items: Iterable[Item]) -> None:
        """Raise GatewayError for an input that could not be kept."""
        size = RESPONSE_BYTES + sum(map(_stored_bytes, items))
        if size > self._tenant_bytes:
            raise self._too_large(size)

    def make_room(self, t: Transaction, new: New) -> bool:
        """Forget some of the tenant's oldest responses if it has no room; return whether to go on so."""
        over = kept.kept(t, new.tenant, KIND) + new.bytes - self._tenant_bytes
        if over <= 0 or new.bytes > self._tenant_bytes:
            return False
        return 0 < self._forget_oldest(t, new.tenant, new.id, over) < over

    def keep(self, t: Transaction, new: New) -> None:
        """Keep a response; one that has too many older ones in its way is refused, without `make_room`."""
        now = self._now(t)
        t.execute(
            "INSERT INTO gateway_responses (id, tenant, previous, created, expires, status, background,"
            " body, bytes, request, headers, owner, beat, starts)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, NULL, ?, 0)",
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
            now,
        )
        items = [*new.given, *new.made]
        t.execute(
            "INSERT INTO gateway_response_sizes (response, items, bytes) VALUES (?, ?, ?)",
            new.id,
            len(items),
            sum(item.size for item in items),
        )
        size = new.bytes
        _add_items(t, new.id, new.given, 0, is_output=False)
        _add_items(t, new.id, new.made, len(new.given), is_output=True)
        if new.status in history.ANSWERED:
            _add_names(t, new.id, new.tenant, names_of(items))
        if size > self._tenant_bytes or not self._count(t, new.id, new.tenant, size):
            raise self._too_large(size)

    def finish(
        self,
        t: Transaction,
        response: Kept,
        status: str,
        body: str,
        made: Sequence[Item],
        names: Sequence[Name] = (),
    ) -> None:
        """Write down the answer of a background response; `names` are of its input."""
        row = t.one("SELECT COUNT(*) FROM gateway_response_items WHERE response = ?", response.id)
        first = 0 if row is None else int(row[0])
        t.execute(
            "UPDATE gateway_responses SET status = ?, body = ?, request = NULL, headers = NULL, owner = NULL"
            " WHERE id = ?",
            status,
            body,
            response.id,
        )
        t.execute(
            "UPDATE gateway_response_sizes SET items = items + ?, bytes = bytes + ? WHERE response = ?",
            len(made),
            sum(item.size for item in made),
            response.id,
        )
        size = _text_bytes(body) - sum(map(_text_bytes, (response.body, response.request, response.headers)))
        size += _add_items(t, response.id, made, first, is_output=True)
        if status in history.ANSWERED:
            _add_names(t, response.id, response.tenant, [*names, *names_of(made, first)])
        self._count(t, response.id, response.tenant, size)

    def get(self, t: Transaction, response_id: str, tenant: str) -> Kept | None:
        """Return a response of this tenant with its output."""
        row = self._row(t, response_id, tenant)
        if row is None:
            return None
        rows = t.all(
            "SELECT body FROM gateway_response_items WHERE response = ? AND is_output = 1 ORDER BY position",
            response_id,
        )
        return kept_of(row, [str(body).encode() for (body,) in rows])

    def history(self, t: Transaction, response_id: str, tenant: str) -> list[bytes]:
        """Return the items of a response and of all before it; raise GatewayError if one is missing."""
        self._refuse_unanswered(t, response_id, tenant)
        return history.bodies(t, response_id)

    def inputs(
        self, t: Transaction, response_id: str, tenant: str, order: str, after: str | None, limit: int
    ) -> tuple[list[tuple[str, bytes]], bool]:
        """Return ids and bodies of the input, and whether there are more."""
        if self._row(t, response_id, tenant) is None:
            raise absent(response_id)
        return history.page(t, response_id, order, after, limit)

    def delete(self, t: Transaction, response_id: str, tenant: str) -> None:
        if self._row(t, response_id, tenant) is None:
            raise absent(response_id)
        self._drop(t, [response_id])

    def in_background(self, t: Transaction, response_id: str, tenant: str) -> Kept:
        """Return a response that can be cancelled; raise GatewayError for another one."""
        response = self.get(t, response_id, tenant)
        if response is None:
            raise absent(response_id)
        if not response.is_background:
            raise GatewayError(400, "only a response made with background: true can be cancelled")
        return response

    def sweep(self, t: Transaction) -> int:
        """Forget responses whose time has come, some at a time; return how many."""
        rows = t.all(
            "SELECT id FROM gateway_responses r WHERE expires < ? AND NOT EXISTS"
            " (SELECT 1 FROM gateway_responses f WHERE f.previous = r.id) AND NOT EXISTS"
            " (SELECT 1 FROM gateway_response_references f WHERE f.target = r.id) LIMIT ?",
            self._now(t),
            SWEPT_TOGETHER,
        )
        self._drop(t, [str(response_id) for (response_id,) in rows])
        return len(rows)

    def _row(self, t: Transaction, response_id: str, tenant: str) -> Row | None:
        if "\0" in response_id:  # PostgreSQL takes none in a text
            return None
        return t.one(
            f"SELECT {FIELDS} FROM gateway_responses WHERE id = ? AND tenant = ? AND expires > ?",
            response_id,
            tenant,
            self._now(t),
        )

    def _refuse_unanswered(self, t: Transaction, response_id: str, tenant: str) -> None:
        row = self._row(t, response_id, tenant)
        if row is None:
            raise history.not_found(response_id)
        status = kept_of(row).status
        if status not in history.ANSWERED:
            raise GatewayError(400, f"response {response_id!r} is {status}", parameter="previous_response_id")

    def _count(self, t: Transaction, response_id: str, tenant: str, size: int) -> bool:
        """Count what is kept more, forget the oldest of a full tenant; return whether all has room now."""
        t.execute("UPDATE gateway_responses SET bytes = bytes + ? WHERE id = ?", size, response_id)
        over = kept.add(t, tenant, KIND, size) - self._tenant_bytes
        return over <= 0 or self._forget_oldest(t, tenant, response_id, over) >= over

    def _forget_oldest(self, t: Transaction, tenant: str, but: str, size: int) -> int:
        """Forget some of the oldest responses until there is so much room; return how much there is."""
        rows = t.all(
            "SELECT id, bytes FROM gateway_responses WHERE tenant = ? AND id <> ?"
            " AND status NOT IN ('queued', 'in_progress') ORDER BY created LIMIT ?",
            tenant,
            but,
            SWEPT_TOGETHER,
        )
        oldest, room = [], 0
        for older, older_size in rows:
            oldest.append(str(older))
            room += int(older_size)
            if room >= size:
                break
        self._drop(t, oldest)
        return room

    def _drop(self, t: Transaction, ids: Sequence[str]) -> None:
        for response_id in ids:
            row = t.one("SELECT tenant, bytes FROM gateway_responses WHERE id = ?", response_id)
            # Another gateway may have been faster: its bytes are taken off once.
            if t.execute("DELETE FROM gateway_responses WHERE id = ?", response_id) and row is not None:
                kept.add(t, str(row[0]), KIND, -int(row[1]))
        for table in _BESIDE if ids else ():
            t.many(f"DELETE FROM {table} WHERE response = ?", [(response_id,) for response_id in ids])

    def _too_large(self, size: int) -> GatewayError:
        return GatewayError(
            413,
            f"this response takes {size} bytes; at most {self._tenant_bytes} of a tenant are kept, with those"
            " of responses that wait or run: send store: false, or try again when they have ended",
            code="too_large_to_keep",
            parameter="store",
        )


def names_of(items: Sequence[Item], first: int = 0) -> list[Name]:
    """Return the names of items whose positions begin with `first`."""
    return [
        Name(item.id, position, len(item.body))
        for position, item in enumerate(items, first)
        if not item.is_reference
    ]


def absent(response_id: str) -> GatewayError:
    return GatewayError(404, f"response {response_id!r} is not kept here", code="not_found")


def kept_of(row: Row, output: list[bytes] | None = None) -> Kept:
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


def _add_items(
    t: Transaction, response_id: str, items: Sequence[Item], first: int, *, is_output: bool
) -> int:
    """Return the bytes that are kept more."""
    numbered = list(enumerate(items, first))
    rows = [
        (response_id, position, item.id, int(is_output), item.body.decode()) for position, item in numbered
    ]
    references = [
        (response_id, position, item.origin.response, item.origin.position)
        for position, item in numbered
        if item.origin is not None
    ]
    if rows:
        t.many(
            "INSERT INTO gateway_response_items (response, position, id, is_output, body)"
            " VALUES (?, ?, ?, ?, ?)",
            rows,
        )
    if references:
        t.many(
            "INSERT INTO gateway_response_references (response, position, target, target_position)"
            " VALUES (?, ?, ?, ?)",
            references,
        )
    return sum(map(_stored_bytes, items))


def _add_names(t: Transaction, response_id: str, tenant: str, names: Sequence[Name]) -> None:
    """Let requests name these items; of equal ids the last one counts."""
    last = {name.id: name for name in names}
    rows = [(name.id, tenant, response_id, name.position, name.bytes) for _, name in sorted(last.items())]
    if rows:
        t.many(
            "INSERT INTO gateway_response_item_names (id, tenant, response, position, bytes)"
            " VALUES (?, ?, ?, ?, ?) ON CONFLICT (id, tenant) DO UPDATE SET response = excluded.response,"
            " position = excluded.position, bytes = excluded.bytes",
            rows,
        )


def _stored_bytes(item: Item) -> int:
    return ITEM_BYTES + len(item.body) + len(item.id)


def _text_bytes(text: str | None) -> int:
    return len((text or "").encode())
