"""Answers /v1/embeddings with what the frontend does not pass on, such as a chat, and Cohere's /v2/embed."""

from __future__ import annotations

import array
import base64
import sys
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from dynamo_vllm.gateway.apis.calls import missing, read_fields
from dynamo_vllm.gateway.apis.rerank import cohere_meta
from dynamo_vllm.gateway.exchange import answered, json_reply, read_body
from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.wire_pooling import EMBEDDINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from dynamo_vllm.gateway.apis.calls import Workers
    from dynamo_vllm.serving.calls.caller import Chunk

PATH, COHERE_PATH = "/v1/embeddings", "/v2/embed"
TRUNCATE: Mapping[str, Mapping[str, Any]] = {
    "NONE": {},
    "START": {"truncate_prompt_tokens": -1, "truncation_side": "left"},
    "END": {"truncate_prompt_tokens": -1, "truncation_side": "right"},
}
"""Cohere's words for what happens to a long text."""


def routes(workers: Workers) -> list[Route]:
    async def embed(request: Request) -> Response:
        fields = read_fields(await read_body(request))
        return json_reply(joined(await workers.whole(request, EMBEDDINGS, fields)))

    async def embed_for_cohere(request: Request) -> Response:
        fields = read_fields(await read_body(request))
        kinds, body = read_cohere(fields)
        found = joined(await workers.whole(request, EMBEDDINGS, body))
        name = caller_of(request.headers).request_id
        return json_reply(cohere_answer(kinds, body["input"], found, name))

    return [
        Route(PATH, answered(embed), methods=["POST"]),
        Route(COHERE_PATH, answered(embed_for_cohere), methods=["POST"]),
    ]


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return the pieces of an answer as one, with the sum of their usage."""
    if not chunks:
        raise GatewayError(502, "the worker ended before it answered")
    data, usage = [], dict.fromkeys(chunks[0]["usage"], 0)
    for chunk in chunks:
        data += chunk["data"]
        for name, count in chunk["usage"].items():
            usage[name] = usage.get(name, 0) + count
    return {**chunks[0], "data": data, "usage": usage}


# --- Cohere ---------------------------------------------------------------------------------------------


def read_cohere(fields: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the kinds of numbers that are asked for, and the body for a worker."""
    texts = fields.get("texts")
    if texts is None:
        raise missing("texts")
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise GatewayError(400, "texts is a list of texts", parameter="texts")
    for name in ("images", "inputs"):
        if fields.get(name):
            raise GatewayError(400, f"{name} is not supported here; give texts", parameter=name)
    kinds = fields.get("embedding_types") or ["float"]
    if not isinstance(kinds, list) or not all(str(kind) in KINDS for kind in kinds):
        raise GatewayError(
            400, f"embedding_types are some of {', '.join(KINDS)}", parameter="embedding_types"
        )
    truncate = str(fields.get("truncate") or "END")
    if truncate not in TRUNCATE:
        raise GatewayError(400, f"truncate is one of {', '.join(TRUNCATE)}", parameter="truncate")
    body = {"model": fields["model"], "input": texts, "encoding_format": "base64", **TRUNCATE[truncate]}
    for theirs, ours in (("output_dimension", "dimensions"), ("max_tokens", "truncate_prompt_tokens")):
        if fields.get(theirs) is not None:
            body[ours] = fields[theirs]
    return kinds, body


def cohere_answer(kinds: Sequence[str], texts: Sequence[str], found: Chunk, name: str) -> dict[str, Any]:
    vectors = [one["embedding"] for one in found["data"]]
    return {
        "id": name,
        "embeddings": {kind: [KINDS[kind](vector) for vector in vectors] for kind in kinds},
        "texts": texts,
        "response_type": "embeddings_by_type",
        "meta": cohere_meta(found["usage"]),
    }


def _floats(vector: str) -> list[float]:
    numbers = array.array("f", base64.b64decode(vector))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _unsigned_bits(vector: str) -> list[int]:
    """Return one bit per number, whether it is above zero, eight to a byte, the first the highest."""
    bits = [number > 0 for number in _floats(vector)]
    return [
        sum(bit << (7 - place) for place, bit in enumerate(bits[start : start + 8]))
        for start in range(0, len(bits), 8)
    ]


def _signed_bits(vector: str) -> list[int]:
    return [byte - 128 for byte in _unsigned_bits(vector)]


KINDS: Mapping[str, Callable[[str], Any]] = {
    "float": _floats,
    "base64": str,
    "binary": _signed_bits,
    "ubinary": _unsigned_bits,
}
"""Cohere's kinds of numbers that follow from a vector alone; int8 and uint8 need a calibration."""
