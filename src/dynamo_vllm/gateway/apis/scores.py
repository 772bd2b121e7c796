"""Answers /v1/score and /score as `vllm serve` does, and asks workers for scores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import Route

from dynamo_vllm.gateway.apis.calls import read_fields
from dynamo_vllm.gateway.apis.texts import several_texts
from dynamo_vllm.gateway.exchange import answered, json_reply, read_body
from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.wire_pooling import SCORE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from dynamo_vllm.gateway.apis.calls import Workers

PATHS = ("/v1/score", "/score")
NAMES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""The two fields with texts, in the order in which `vllm serve` looks for them."""


class _Scored(msgspec.Struct):
    """What a worker answers."""

    scores: list[float]
    usage: dict[str, int]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A request for scores."""

    fields: Mapping[str, Any]
    """What the worker gets beside the texts."""
    names: tuple[str, str]
    """Of the client's fields with texts."""
    first: Sequence[str]
    second: Sequence[str]

    @property
    def for_worker(self) -> dict[str, Any]:
        query = self.first[0] if len(self.first) == 1 else self.first
        return {**self.fields, "query": query, "documents": self.second}


def routes(workers: Workers) -> list[Route]:
    async def score(request: Request) -> Response:
        asked = read(await read_body(request))
        try:
            scores, usage = await scores_of(workers, request, SCORE, asked.for_worker)
        except GatewayError as exc:
            raise in_words_of(asked, exc) from exc
        return json_reply(answer(asked, scores, usage, f"score-{caller_of(request.headers).request_id}"))

    return [Route(path, answered(score), methods=["POST"]) for path in PATHS]


async def scores_of(
    workers: Workers, request: Request, api: str, body: Mapping[str, Any]
) -> tuple[list[float], dict[str, int]]:
    """Return a worker's scores, in the order of the documents, and the usage."""
    chunks = await workers.whole(request, api, body)
    try:
        found = msgspec.convert(chunks[-1] if chunks else {}, _Scored)
    except msgspec.ValidationError:
        raise GatewayError(502, "the worker ended before it answered") from None
    if len(found.scores) != len(body["documents"]):
        raise GatewayError(502, "the worker scored something else")
    return found.scores, found.usage


def read(body: bytes) -> Pairs:
    """Return the request; raise GatewayError for one that is not to be understood."""
    fields = read_fields(body)
    names = next((pair for pair in NAMES if all(fields.get(name) is not None for name in pair)), None)
    if names is None:
        raise GatewayError(
            400,
            f"give two fields with texts: {', '.join(' and '.join(pair) for pair in NAMES)}",
            parameter=_half(fields),
        )
    first, second = (several_texts(fields[name], name) for name in names)
    if len(first) not in (1, len(second)):
        raise GatewayError(
            400,
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; give one, or as many",
            parameter=names[0],
        )
    texts = {name for pair in NAMES for name in pair}
    rest = {name: value for name, value in fields.items() if name not in texts}
    return Pairs(rest, names, first, second)


def in_words_of(asked: Pairs, exc: GatewayError) -> GatewayError:
    """Return a worker's refusal with the names of the client's fields."""
    for theirs, ours in zip(("query", "documents"), asked.names, strict=True):
        field = exc.parameter or ""
        if field.partition("[")[0] == theirs and exc.message.startswith(theirs):
            message = ours + exc.message.removeprefix(theirs)
            parameter = ours + field.removeprefix(theirs)
            return GatewayError(exc.status, message, code=exc.code, parameter=parameter)
    return exc


def _half(fields: Mapping[str, Any]) -> str:
    """Return the field that is missing, to which the other is there."""
    for first, second in NAMES:
        for given, other in ((first, second), (second, first)):
            if given in fields and other not in fields:
                return other
    return NAMES[0][0]


def answer(asked: Pairs, scores: Sequence[float], usage: Mapping[str, int], name: str) -> dict[str, Any]:
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": asked.fields["model"],
        "data": data,
        "usage": usage,
    }
