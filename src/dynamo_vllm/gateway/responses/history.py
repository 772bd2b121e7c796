"""Reads conversations: the responses before one, and the items that others stand for.

How long a conversation is, is known before its text is read: nobody can make the gateway read, copy or keep
more than the frontend takes in one request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.exchange import BODY_BYTES
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses.items import Origin
from dynamo_vllm.gateway.store.sql import in_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dynamo_vllm.gateway.database import Row, Transaction
    from dynamo_vllm.gateway.responses.items import Item

LONGEST_CHAIN = 10_000
MOST_HISTORY_ITEMS = 50_000
PAGE_BYTES = 16 << 20
"""Of listed items; one that is longer has a page of its own."""
ANSWERED = ("completed", "incomplete")
"""States of responses that can be continued, and whose items can be named."""
_CHAIN = f"""
    WITH RECURSIVE chain (id, previous, depth) AS (
        SELECT id, previous, 0 FROM gateway_responses WHERE id = ?
        UNION ALL
        SELECT r.id, r.previous, c.depth + 1
        FROM gateway_responses r JOIN chain c ON r.id = c.previous WHERE c.depth < {LONGEST_CHAIN}
    )
"""
_WITH_ORIGINALS = """
    LEFT JOIN gateway_response_references f ON f.response = i.response AND f.position = i.position
    LEFT JOIN gateway_response_items o ON o.response = f.target AND o.position = f.target_position
"""


@dataclass(frozen=True, slots=True)
class OwnItem:
    """An item of a response's own input."""

    id: str
    position: int
    text: bytes
    """Of the original, if it stands for another one."""
    is_reference: bool


def resolved(t: Transaction, items: Sequence[Item], tenant: str, now: float) -> list[Item]:
    """Return the items, references with their origins; raise GatewayError for one that is not kept."""
    names = {item.id for item in items if item.is_reference}
    rows = in_list(
        t,
        "SELECT n.id, n.response, n.position, n.bytes, r.tenant, r.status, r.expires"
        " FROM gateway_response_item_names n JOIN gateway_responses r ON r.id = n.response"
        " AND r.tenant = n.tenant WHERE n.id IN",
        names,
    )
    origins = {
        str(name): Origin(str(response), int(position), int(size))
        for name, response, position, size, owner, status, expires in rows
        if owner == tenant and status in ANSWERED and expires > now
    }
    if missing := names - origins.keys():
        raise item_not_found(min(missing))
    return [replace(item, origin=origins[item.id]) if item.is_reference else item for item in items]


def refuse_too_long(t: Transaction, previous: str | None, items: Sequence[Item]) -> None:
    """Raise GatewayError if the history with these items is more than the frontend takes."""
    history_items, history_bytes = (0, 0) if previous is None else _size(t, previous)
    size = history_bytes + sum(item.size for item in items)
    if size > BODY_BYTES:
        raise GatewayError(
            413,
            f"the input has {size} bytes with its history and the items that it names; at most {BODY_BYTES}"
            " are possible: begin a new conversation, or leave out items",
            code="request_too_large",
            parameter="input",
        )
    if history_items > MOST_HISTORY_ITEMS:
        raise GatewayError(
            413,
            f"the conversation has {history_items} items; at most {MOST_HISTORY_ITEMS} are possible:"
            " begin a new one",
            code="request_too_large",
            parameter="previous_response_id",
        )


def bodies(t: Transaction, previous: str) -> list[bytes]:
    """Return the items of a response and of all before it, the oldest first."""
    rows = t.all(
        f"{_CHAIN} SELECT i.id, i.body, f.target, o.body FROM chain c"
        f" JOIN gateway_response_items i ON i.response = c.id {_WITH_ORIGINALS}"
        " ORDER BY c.depth DESC, i.position",
        previous,
    )
    return [_body(row, lambda name: not_found(previous, f": its item {name!r} was deleted")) for row in rows]


def own_bodies(t: Transaction, response_id: str) -> list[OwnItem]:
    """Return a response's own input."""
    rows = t.all(
        "SELECT i.id, i.body, f.target, o.body, i.position FROM gateway_response_items i"
        f" {_WITH_ORIGINALS} WHERE i.response = ? AND i.is_output = 0 ORDER BY i.position",
        response_id,
    )
    return [
        OwnItem(str(row[0]), int(row[4]), _body(row, item_not_found), is_reference=row[2] is not None)
        for row in rows
    ]


def with_originals(t: Transaction, items: Iterable[Item]) -> list[bytes]:
    """Return the bodies of a request's items."""
    return [item.body if item.origin is None else _original(t, item.id, item.origin) for item in items]


def page(
    t: Transaction, response_id: str, order: str, after: str | None, limit: int
) -> tuple[list[tuple[str, bytes]], bool]:
    """Return ids and bodies of a response's input with its history, and whether there are more."""
    rows = t.all(
        f"{_CHAIN} SELECT i.id, i.response, i.position FROM chain c JOIN gateway_response_items i"
        " ON i.response = c.id WHERE c.depth > 0 OR i.is_output = 0 ORDER BY c.depth DESC, i.position",
        response_id,
    )
    if order == "desc":
        rows.reverse()
    if after is not None:
        ids = [str(item_id) for item_id, _, _ in rows]
        if after not in ids:
            raise GatewayError(400, f"there is no item {after!r}", parameter="after")
        rows = rows[ids.index(after) + 1 :]
    items: list[tuple[str, bytes]] = []
    size = 0
    for item_id, response, position in rows[:limit]:
        row = t.one(
            "SELECT COALESCE(o.body, i.body) FROM gateway_response_items i"
            f" {_WITH_ORIGINALS} WHERE i.response = ? AND i.position = ?",
            response,
            position,
        )
        body = b"{}" if row is None else str(row[0]).encode()
        size += len(body)
        if items and size > PAGE_BYTES:
            break
        items.append((str(item_id), body))
    return items, len(rows) > len(items)


def not_found(response_id: str, which: str = "") -> GatewayError:
    """The status and the code are OpenAI's: clients send the whole conversation again when they see them."""
    return GatewayError(
        400,
        f"Previous response with id {response_id!r} not found{which}.",
        code="previous_response_not_found",
        parameter="previous_response_id",
    )


def item_not_found(name: str) -> GatewayError:
    return GatewayError(
        404,
        f"item {name!r} is not kept; send the item itself",
        code="item_not_found",
        parameter="input",
    )


def _size(t: Transaction, previous: str) -> tuple[int, int]:
    """Return how many items and bytes a conversation has; raise GatewayError if its beginning is gone."""
    rows = t.all(
        f"{_CHAIN} SELECT c.depth, c.previous, s.items, COALESCE(s.bytes, r.bytes) FROM chain c"
        " JOIN gateway_responses r ON r.id = c.id LEFT JOIN gateway_response_sizes s ON s.response = c.id",
        previous,
    )
    depth, beginning = max((int(row[0]), row[1]) for row in rows) if rows else (0, previous)
    if beginning is not None and depth >= LONGEST_CHAIN:
        raise GatewayError(
            400,
            f"the conversation has more than {LONGEST_CHAIN} responses; begin a new one",
            parameter="previous_response_id",
        )
    if beginning is not None:
        raise not_found(str(beginning), " (an earlier one of this conversation)")
    return sum(int(row[2] or 0) for row in rows), sum(int(row[3]) for row in rows)


def _original(t: Transaction, name: str, origin: Origin) -> bytes:
    row = t.one(
        "SELECT body FROM gateway_response_items WHERE response = ? AND position = ?",
        origin.response,
        origin.position,
    )
    if row is None:
        raise item_not_found(name)
    return str(row[0]).encode()


def _body(row: Row, missing: Callable[[str], GatewayError]) -> bytes:
    name, body, target, original = row[:4]
    if target is not None and original is None:
        raise missing(str(name))
    return str(body if target is None else original).encode()
