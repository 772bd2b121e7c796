"""Reads the items of requests and answers without decoding more of them than their names."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Raw, UnsetType

from dynamo_vllm.gateway.exchange import decoded
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Fields = dict[str, Raw]
"""An object whose values stay as they were written."""
NULL = Raw(b"null")
MOST_ITEMS = 1000
"""In the input of one request."""
LONGEST_ID = 256
"""Characters; OpenAI takes 64."""
LISTED_FIELD_BYTES = 1 << 20
"""An item with more in fields beside its content is listed as it is, without defaults."""
REFERENCE = "item_reference"
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}
# A struct with so many fields refuses a longer list at the first item too many, before it is in memory.
_InputList = msgspec.defstruct(
    "_InputList",
    [(f"item_{number}", Raw, UNSET) for number in range(MOST_ITEMS)],
    array_like=True,
    forbid_unknown_fields=True,
)


class _Named(msgspec.Struct):
    id: str | None = None
    type: str | None = None


class _Listed(msgspec.Struct):
    content: Raw | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an item is kept that another one stands for."""

    response: str
    position: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """An item as it is kept; its id may be ours, if the client gave none."""

    id: str
    body: bytes
    is_reference: bool = False
    """Whether it stands for an item that is kept already."""
    origin: Origin | None = None
    """That item, once it was looked up."""

    @property
    def size(self) -> int:
        """Return the bytes that the frontend gets for it."""
        return len(self.body) if self.origin is None else self.origin.bytes


def raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def input_items(given: Raw | None) -> list[Item]:
    """Return the items of a request's `input`."""
    if given is None:
        raise GatewayError(400, "the request has no input", parameter="input")
    text = bytes(given)
    if text.startswith(b'"'):
        message = b'{"type":"message","role":"user","content":[{"type":"input_text","text":' + text + b"}]}"
        return [Item(new_id("msg_"), message)]
    if not text.startswith(b"["):
        raise GatewayError(400, "input is a text or a list of items", parameter="input")
    try:
        items = msgspec.json.decode(text, type=_InputList)
    except msgspec.ValidationError:
        raise GatewayError(
            400,
            f"input has more than {MOST_ITEMS} items; continue a response (previous_response_id) instead,"
            " or send store: false and items without references",
            parameter="input",
        ) from None
    values = (getattr(items, name) for name in items.__struct_fields__)
    return [_item(item) for item in values if item is not UNSET]


def output_items(response: Mapping[str, Raw]) -> list[Item]:
    """Return the items of a response's `output`."""
    return [_item(item) for item in msgspec.json.decode(response.get("output", b"[]"), type=list[Raw])]


def joined(items: Iterable[bytes]) -> Raw:
    """Return a list of items."""
    return Raw(b"[" + b",".join(items) + b"]")


def listed(item_id: str, body: bytes) -> Raw:
    """Return an item as a list of items shows it."""
    content = msgspec.json.decode(body, type=_Listed).content
    if len(body) - (0 if content is UNSET else memoryview(content).nbytes) > LISTED_FIELD_BYTES:
        return Raw(body)
    fields = msgspec.json.decode(body, type=Fields)
    fields.setdefault("type", raw("message"))
    if bytes(fields["type"]) == b'"message"':
        fields.setdefault("status", raw("completed"))
        if bytes(text := fields.get("content", NULL)).startswith(b'"'):
            kind = "output_text" if bytes(fields.get("role", NULL)) == b'"assistant"' else "input_text"
            fields["content"] = raw([{"type": kind, "text": text}])
    return raw({**fields, "id": item_id})


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def _item(given: Raw) -> Item:
    body = bytes(given)
    named = decoded(body, _Named)
    if named.id is not None and (len(named.id) > LONGEST_ID or "\0" in named.id):
        raise GatewayError(
            400,
            f"the id of an item has at most {LONGEST_ID} characters, and no NUL; this one is"
            f" {named.id[:40]!r}… with {len(named.id)}",
            parameter="input",
        )
    if named.type == REFERENCE:
        if named.id is None:
            raise GatewayError(400, "an item_reference has an id", parameter="input")
        reference = msgspec.json.encode({"type": REFERENCE, "id": named.id})
        return Item(named.id, reference, is_reference=True)
    return Item(named.id or new_id(_PREFIXES.get(named.type or "message", "item_")), body)
