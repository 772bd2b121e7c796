"""Answers /v1/rerank, /rerank and /v2/rerank in the shapes of Jina, vLLM and Cohere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from dynamo_vllm.gateway.apis.calls import missing, read_fields
from dynamo_vllm.gateway.apis.scores import scores_of
from dynamo_vllm.gateway.apis.texts import one_text, several_texts
from dynamo_vllm.gateway.exchange import answered, json_reply, read_body
from dynamo_vllm.gateway.identity import caller_of
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.wire_pooling import RERANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from dynamo_vllm.gateway.apis.calls import Workers

PATHS = ("/v1/rerank", "/rerank")
COHERE_PATH = "/v2/rerank"
_OURS = ("query", "documents", "top_n", "return_documents", "rank_fields", "max_chunks_per_doc")
"""Fields that a worker does not get as they came."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A request for a ranking."""

    fields: Mapping[str, Any]
    """What the worker gets beside the texts."""
    query: str
    documents: Sequence[str]
    top_n: int | None
    returns_documents: bool

    @property
    def for_worker(self) -> dict[str, Any]:
        return {**self.fields, "query": self.query, "documents": self.documents}


def routes(workers: Workers) -> list[Route]:
    async def rank(request: Request) -> Response:
        asked = read(await read_body(request), returns_documents=True)
        scores, usage = await scores_of(workers, request, RERANK, asked.for_worker)
        name = f"rerank-{caller_of(request.headers).request_id}"
        return json_reply(answer(asked, scores, usage, name))

    async def rank_for_cohere(request: Request) -> Response:
        asked = read(await read_body(request), returns_documents=False, shortens=True)
        scores, usage = await scores_of(workers, request, RERANK, asked.for_worker)
        return json_reply(cohere_answer(asked, scores, usage, caller_of(request.headers).request_id))

    own = [Route(path, answered(rank), methods=["POST"]) for path in PATHS]
    return [*own, Route(COHERE_PATH, answered(rank_for_cohere), methods=["POST"])]


def read(body: bytes, *, returns_documents: bool, shortens: bool = False) -> Ranking:
    """Return the request; raise GatewayError for one that is not to be understood.

    `returns_documents` is the default of the API. `shortens` is for an API that shortens a long document
    unless told otherwise.
    """
    fields = read_fields(body)
    for name in ("query", "documents"):
        if fields.get(name) is None:
            raise missing(name)
    top_n = fields.get("top_n")
    if top_n is not None and (type(top_n) is not int or top_n < 0):
        raise GatewayError(400, "top_n is a number from 1, or 0 for all", parameter="top_n")
    returns = fields.get("return_documents")
    if not isinstance(returns, bool | None):
        raise GatewayError(400, "return_documents is true or false", parameter="return_documents")
    rest = {name: value for name, value in fields.items() if name not in _OURS}
    if shortens and not {"truncate_prompt_tokens", "max_tokens_per_doc"} & rest.keys():
        rest["truncate_prompt_tokens"] = -1
    return Ranking(
        fields=rest,
        query=one_text(fields["query"], "query"),
        documents=several_texts(fields["documents"], "documents"),
        top_n=top_n or None,
        returns_documents=returns_documents if returns is None else returns,
    )


def results(asked: Ranking, scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return the best documents first; of equal ones the earlier."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    made = []
    for index in order:
        one: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if asked.returns_documents:
            one["document"] = {"text": asked.documents[index]}
        made.append(one)
    return made


def answer(asked: Ranking, scores: Sequence[float], usage: Mapping[str, int], name: str) -> dict[str, Any]:
    """Return the shape that Jina and vLLM give."""
    return {
        "id": name,
        "object": "list",
        "model": asked.fields["model"],
        "usage": usage,
        "results": results(asked, scores),
    }


def cohere_answer(
    asked: Ranking, scores: Sequence[float], usage: Mapping[str, int], name: str
) -> dict[str, Any]:
    """Return the shape of Cohere's second version."""
    return {"id": name, "results": results(asked, scores), "meta": cohere_meta(usage)}


def cohere_meta(usage: Mapping[str, int]) -> dict[str, Any]:
    tokens = usage.get("prompt_tokens", 0)
    return {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
