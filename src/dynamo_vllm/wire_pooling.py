"""Bodies of /v1/embeddings, /v1/classify, /v1/pooling, /v1/rerank and /v1/score, as a worker receives them.

The frontend (1.6.1) passes the first four on without their path, and drops fields that it does not know. The
gateway sends what the frontend does not serve, and names the API in `_api`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.wire import describe

EMBEDDINGS, CLASSIFY, POOLING, RERANK, SCORE = "embeddings", "classify", "pooling", "rerank", "score"
API = "_api"
"""The field with the name of the API, for callers that know it."""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    use_activation: bool | None = None
    priority: int = 0
    cache_salt: str | None = None
    nvext: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")


class InputBody(_Body, frozen=True, kw_only=True):
    """Texts, token ids, or a chat: for embeddings, classes and everything that a pooler gives."""

    api: str = msgspec.field(default="", name=API)
    input: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    task: str | None = None
    add_special_tokens: bool | None = None


class PairsBody(_Body, frozen=True, kw_only=True):
    """A query with documents, or several of both, one each: for reranking and scores."""

    api: str = msgspec.field(default="", name=API)
    query: str | list[str]
    documents: list[str]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0
    instruction: str | None = None

    @property
    def is_named(self) -> bool:
        """Return whether the gateway asks, which makes the client's shape itself."""
        return bool(self.api)


Body = InputBody | PairsBody


def parse(raw: object) -> Body:
    """Return the body, with texts also the name of its API; raises InvalidRequest."""
    if not isinstance(raw, dict):
        raise InvalidRequest("the body is not an object")
    is_pairs = "documents" in raw or "query" in raw
    try:
        body: Body = msgspec.convert(raw, PairsBody) if is_pairs else msgspec.convert(raw, InputBody)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(describe(exc)) from None
    if body.api or isinstance(body, PairsBody):
        return body
    return msgspec.structs.replace(body, api=_api(raw))


def _api(raw: dict[str, Any]) -> str:
    """Tell which of its paths a body without a name came from, by what the frontend adds.

    Of these only bodies for embeddings have no priority, and only those for pooling always have a format.
    """
    if "priority" not in raw:
        return EMBEDDINGS
    return POOLING if "encoding_format" in raw else CLASSIFY
