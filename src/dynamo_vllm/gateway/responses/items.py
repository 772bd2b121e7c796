"""Reads the items of requests and answers without decoding more of them than their names."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from dynamo_vllm.gateway.exchange import decoded
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Fields = dict[str, Raw]
"""An object whose values stay as they were written."""
NULL = Raw(b"null")
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}


class _Named(msgspec.Struct):
    id: str | None = None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """An item as the frontend takes it; its id may be ours, if the client gave none."""

    id: str
    body: str
    reference: str | None = None
    """The id of a kept item that this one stands for."""


def raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def input_items(given: Raw | None) -> list[Item]:
    """Return the items of a request's `input`."""
    if given is None:
        raise GatewayError(400, "the request has no input", parameter="input")
    try:
        found = msgspec.json.decode(given, type=str | list[Raw])
    except msgspec.ValidationError:
        raise GatewayError(400, "input is a text or a list of items", parameter="input") from None
    if isinstance(found, str):
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": found}]}
        return [Item(new_id("msg_"), msgspec.json.encode(message).decode())]
    return [_item(one) for one in found]


def output_items(response: Mapping[str, Raw]) -> list[Item]:
    """Return the items of a response's `output`."""
    return [_item(one) for one in msgspec.json.decode(response.get("output", b"[]"), type=list[Raw])]


def joined(items: Iterable[str]) -> Raw:
    """Return a list of items."""
    return Raw(f"[{','.join(items)}]".encode())


def listed(item_id: str, body: str) -> dict[str, Any]:
    """Return an item as a list of items shows it."""
    shown: dict[str, Any] = msgspec.json.decode(body)
    shown.setdefault("type", "message")
    if shown["type"] == "message":
        shown.setdefault("status", "completed")
        if isinstance(shown.get("content"), str):
            kind = "output_text" if shown.get("role") == "assistant" else "input_text"
            shown["content"] = [{"type": kind, "text": shown["content"]}]
    return {**shown, "id": item_id}


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def _item(given: Raw) -> Item:
    named = decoded(bytes(given), _Named)
    try:
        body = bytes(given).decode()
    except UnicodeDecodeError:
        raise GatewayError(400, "an item is not UTF-8", parameter="input") from None
    if named.type == "item_reference":
        if named.id is None:
            raise GatewayError(400, "an item_reference has an id", parameter="input")
        return Item(named.id, body, reference=named.id)
    return Item(named.id or new_id(_PREFIXES.get(named.type or "message", "item_")), body)
