"""Reads a request to /v1/responses and builds the one that the frontend gets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from dynamo_vllm.gateway.exchange import decoded, is_utf8
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.responses.items import NULL, REFERENCE, Fields, Item, input_items, joined, raw

if TYPE_CHECKING:
    from collections.abc import Sequence

FIELD_BYTES = 8 << 20
"""For all that is no item: instructions, tools and so on. A field takes more memory than it has bytes."""
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "model": None,
    "parallel_tool_calls": True,
    "reasoning": None,
    "service_tier": "auto",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that a response repeats, with the values of those that were not given."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request; `fields` are all that the client sent."""

    fields: Fields
    items: list[Item]
    """Not read of a plain request."""
    previous: str | None
    is_plain: bool
    """Whether the frontend can answer it alone."""
    is_stored: bool
    is_streamed: bool
    is_background: bool

    @property
    def names_others(self) -> bool:
        """Whether it continues a response or names items of others: both must be read first."""
        return self.previous is not None or any(item.is_reference for item in self.items)

    def for_frontend(self, items: Sequence[bytes]) -> bytes:
        """Return the body with these items: the history and what they stand for."""
        return body_for_frontend(self.fields, joined(items), self.is_stored)


class _Settings(msgspec.Struct):
    input: Raw = NULL
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None


def read(body: bytes) -> Asked:
    """Return the request; raise GatewayError for one that cannot be done here."""
    if not is_utf8(body):
        raise GatewayError(400, "the body is not UTF-8")
    settings = decoded(body, _Settings)
    field_bytes = len(body) - memoryview(settings.input).nbytes
    if field_bytes > FIELD_BYTES:
        raise GatewayError(
            413,
            f"the fields beside input have {field_bytes} bytes; at most {FIELD_BYTES} are possible",
            code="request_too_large",
        )
    fields = decoded(body, Fields)
    if fields.get("conversation", NULL) != NULL:
        raise GatewayError(
            400,
            "conversation is not supported here; use previous_response_id",
            code="unsupported_parameter",
            parameter="conversation",
        )
    is_stored = settings.store is not False
    is_background = settings.background is True
    if is_background and not is_stored:
        raise GatewayError(400, "background: true needs store: true", parameter="store")
    if is_background and settings.stream is True:
        raise GatewayError(
            400,
            "a background response is not streamed; leave out stream and poll it",
            code="unsupported_parameter",
            parameter="stream",
        )
    refers = REFERENCE.encode() in memoryview(settings.input).tobytes()
    is_plain = settings.previous_response_id is None and not is_stored and not refers
    return Asked(
        fields=fields,
        items=[] if is_plain else input_items(fields.get("input")),
        previous=settings.previous_response_id,
        is_plain=is_plain,
        is_stored=is_stored,
        is_streamed=settings.stream is True,
        is_background=is_background,
    )


def body_for_frontend(fields: Fields, items: Raw, is_stored: bool) -> bytes:
    ours = {"input": items, "store": raw(is_stored)}
    others = {k: v for k, v in fields.items() if k not in ("previous_response_id", "background")}
    return msgspec.json.encode(others | ours)


def queued(response_id: str, asked: Asked) -> Fields:
    """Return the response that a client sees of a background request before it has an answer."""
    echoed = {name: asked.fields.get(name, raw(value)) for name, value in _ECHOED.items()}
    return echoed | {
        name: raw(value)
        for name, value in {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued",
            "background": True,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": asked.previous,
            "store": True,
            "usage": None,
        }.items()
    }
