"""Errors of the gateway have the types that the clients of a path know."""

from __future__ import annotations

import json

import pytest

from dynamo_vllm.gateway.replies import GatewayError


@pytest.mark.parametrize(
    ("status", "path", "wanted"),
    [
        (401, "/v1/chat/completions", "invalid_request_error"),
        (401, "/v1/messages", "authentication_error"),
        (403, "/v1/messages/count_tokens", "permission_error"),
        (400, "/v1/messages", "invalid_request_error"),
        (429, "/v1/messages", "rate_limit_error"),
        (504, "/v1/messages", "api_error"),
        (504, "/v1/completions", "server_error"),
    ],
)
def test_type_is_one_of_the_api(status: int, path: str, wanted: str) -> None:
    body = json.loads(GatewayError(status, "why", code="c").body(path))
    assert body["type"] == "error"
    assert body["error"] == {"message": "why", "type": wanted, "param": None, "code": "c"}
