"""What the frontend gets of a request."""

from __future__ import annotations

import json
from typing import Any

from dynamo_vllm.gateway import exchange
from dynamo_vllm.gateway.responses.asked import read
from harness.refusals import refused


def asked(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "hello", **fields}).encode()


def test_history_stands_before_the_input_and_other_fields_stay() -> None:
    found = read(asked(previous_response_id="resp_1", tools=[{"a": 1.50}], instructions="be kind"))
    sent = json.loads(found.for_frontend([b'{"old":1}', *(item.body for item in found.items)]))
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    assert sent == {
        "model": "m",
        "input": [{"old": 1}, message],
        "tools": [{"a": 1.5}],
        "instructions": "be kind",
        "store": True,
    }


def test_request_without_store_and_history_is_plain() -> None:
    assert read(asked(store=False)).is_plain
    assert not read(asked()).is_plain
    assert not read(asked(store=False, previous_response_id="resp_1")).is_plain
    reference = [{"type": "item_reference", "id": "msg_1"}]
    assert not read(asked(store=False, input=reference)).is_plain


def test_what_cannot_be_done_is_refused_by_name() -> None:
    for fields, parameter in (
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True, "store": False}, "store"),
        ({"background": True, "stream": True}, "stream"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input"),
    ):
        with refused(400, parameter=parameter):
            read(asked(**fields))


def test_errors_of_the_frontend_keep_status_and_text() -> None:
    for body, message in {
        b'{"message":"Model not found","type":"Not Found","code":404}': "Model not found",
        b'{"error":{"message":"no","code":"x","param":null}}': "no",
        b'{"error":"no"}': "no",
        b"upstream connect error": "upstream connect error",
        b"": "status 503",
    }.items():
        error = exchange.refused(503, body, "3")
        assert (error.status, error.message, error.headers) == (503, message, {"retry-after": "3"})
