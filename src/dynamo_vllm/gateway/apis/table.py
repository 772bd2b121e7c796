"""Lists the routes that workers answer without the frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.gateway.apis import embeddings, rerank, scores
from dynamo_vllm.gateway.apis.calls import Workers
from dynamo_vllm.gateway.apis.models import Models
from dynamo_vllm.gateway.apis.transcription import Transcription
from dynamo_vllm.serving.calls.caller import Caller

if TYPE_CHECKING:
    import httpx
    from starlette.routing import Route

    from dynamo_vllm.gateway.control.authorization import Authorizer
    from dynamo_vllm.serving.calls.directory import Directory


def routes(frontend: httpx.AsyncClient, directory: Directory, authorizer: Authorizer) -> list[Route]:
    """`directory` is open as long as the routes are used."""
    workers = Workers(Caller(directory))
    return [
        *rerank.routes(workers),
        *scores.routes(workers),
        *embeddings.routes(workers),
        *Transcription(workers, authorizer.check_limits, authorizer.check_model).routes(),
        *Models(frontend, directory).routes(),
    ]
