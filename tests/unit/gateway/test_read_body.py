"""A body is read to its limit, and a client that leaves meanwhile is no fault of the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from dynamo_vllm.gateway.exchange import read_body
from dynamo_vllm.gateway.replies import GatewayError


def request(*messages: dict[str, Any]) -> Request:
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_comes_in_parts_up_to_its_limit() -> None:
    assert await read_body(request(part(b"ab"), part(b"c", more=False)), 3) == b"abc"
    with pytest.raises(GatewayError) as refused:
        await read_body(request(part(b"ab"), part(b"cd")), 3)
    assert refused.value.status == 413


async def test_a_client_that_leaves_is_refused_without_a_traceback() -> None:
    with pytest.raises(GatewayError) as refused:
        await read_body(request(part(b"ab"), {"type": "http.disconnect"}), 3)
    assert refused.value.status == 499
