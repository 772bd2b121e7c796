"""What is read and changed of a streamed answer, wherever its chunks begin and end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from dynamo_vllm.gateway.responses.items import Fields, raw
from dynamo_vllm.gateway.responses.stream import changed, unchanged

OURS = {"previous_response_id": raw("resp_0"), "store": raw(True)}


def event(kind: str, number: int, **more: Any) -> bytes:
    body = {"type": kind, "sequence_number": number, **more}
    return f"event: {kind}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


def response(status: str) -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "previous_response_id": None, "store": False, "output": []}


TEXT = event("response.output_text.delta", 1, delta='says "response":{ and a line\n\nmore')
STREAM = (
    event("response.created", 0, response=response("in_progress"))
    + TEXT
    + event("response.completed", 2, response=response("completed"))
    + b"data: [DONE]\n\n"
)


class Chunks(httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes], fails: bool = False) -> None:
        self._chunks = chunks
        self._fails = fails

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        if self._fails:
            raise httpx.ReadError("gone")


def answer(size: int, text: bytes = STREAM, fails: bool = False) -> httpx.Response:
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    return httpx.Response(200, stream=Chunks(chunks, fails))


async def test_every_response_gets_our_fields_and_the_last_is_sent_after_it_was_kept() -> None:
    for size in (1, 2, 7, 50, 333, 10_000):
        order: list[str] = []

        async def keep(fields: Fields, order: list[str] = order) -> Fields:
            order.append(f"kept {bytes(fields['status']).decode()}")
            return fields

        out = b""
        async for part in changed(answer(size), OURS, keep):
            out += part
            order += ["sent"] if b"response.completed" in part else []
        assert order == ['kept "completed"', "sent"]
        assert TEXT in out and out.endswith(b"data: [DONE]\n\n")
        blocks = [block for block in out.split(b"\n\n") if b'"response":{' in block]
        responses = [json.loads(block.split(b"data: ")[1])["response"] for block in blocks]
        assert [response["status"] for response in responses] == ["in_progress", "completed"]
        ours = {(response["previous_response_id"], response["store"]) for response in responses}
        assert ours == {("resp_0", True)}


async def test_lost_frontend_ends_a_stream_with_an_error() -> None:
    async def keep(_: Fields) -> Fields:
        raise AssertionError("nothing is complete")

    cut = STREAM[: STREAM.index(b"event: response.completed")]
    parts = [part async for part in changed(answer(50, cut, fails=True), OURS, keep)]
    assert parts[-1].startswith(b"event: error\n")
    parts = [part async for part in unchanged(answer(50, cut, fails=True))]
    assert parts[-1].startswith(b"event: error\n")
    assert b"".join(parts[:-1]) == cut
