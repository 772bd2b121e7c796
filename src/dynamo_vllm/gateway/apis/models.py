"""Answers /v1/models: what the frontend lists, with what workers say of their models."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from starlette.responses import Response
from starlette.routing import Route

from dynamo_vllm.gateway.exchange import FORWARDED, JSON, answered, json_reply, unreachable
from dynamo_vllm.gateway.identity import models_of
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.requests import Request

    from dynamo_vllm.serving.calls.card import WorkerCard
    from dynamo_vllm.serving.calls.directory import Directory

logger = logging.getLogger(__name__)
PATH = "/v1/models"
WORKERS_SECONDS = 2.0
FRONTEND_SECONDS = 30.0
OWNER = "nvidia"
"""As the frontend says of its models."""
ANTHROPIC = "anthropic-version"
"""A header of Anthropic's SDKs; the frontend then answers in their shape."""
BEGAN = int(time.time())

Model = dict[str, Any]


class Models:
    """The routes and what they need."""

    def __init__(
        self, frontend: httpx.AsyncClient, directory: Directory, *, workers_seconds: float = WORKERS_SECONDS
    ) -> None:
        self._frontend = frontend
        self._workers_seconds = workers_seconds
        self._directory = directory

    def routes(self) -> list[Route]:
        return [
            Route(PATH, answered(self._list), methods=["GET"]),
            Route(PATH + "/{model_id:path}", answered(self._one), methods=["GET"]),
        ]

    async def _list(self, request: Request) -> Response:
        answer = await self._ask(request)
        listed = _decoded(answer)
        if answer.status_code != 200 or not isinstance(listed.get("data"), list):
            return _passed_on(answer)
        models: list[Model] = listed["data"]
        cards = await self._cards([str(model.get("id")) for model in models])
        if cards is not None:
            models = merged(models, cards, adds=not _is_anthropic(request))
        return json_reply({**listed, **of_caller(models, listed, models_of(request.headers))})

    async def _one(self, request: Request) -> Response:
        model_id: str = request.path_params["model_id"]
        allowed = models_of(request.headers)
        if allowed is not None and not _is_below(model_id, allowed):
            raise GatewayError(404, f"there is no model {model_id!r} for this key", parameter="model")
        answer = await self._ask(request)
        found = _decoded(answer)
        if answer.status_code == 200 and found.get("id") != model_id:
            return _passed_on(answer)  # not a model, but something below one
        cards = await self._cards([model_id])
        if cards is None:
            return _passed_on(answer)
        is_listed = answer.status_code == 200
        ours = merged([found] if is_listed else [], cards, adds=not _is_anthropic(request))
        one = next((model for model in ours if model["id"] == model_id), None)
        return _passed_on(answer) if one is None else json_reply(one)

    async def _ask(self, request: Request) -> httpx.Response:
        path: bytes = request.scope["raw_path"]
        query: bytes = request.scope["query_string"]
        url = (path + b"?" + query if query else path).decode("ascii")
        passed = (ANTHROPIC, *FORWARDED)
        headers = {name: request.headers[name] for name in passed if name in request.headers}
        try:
            return await self._frontend.get(url, headers=headers, timeout=FRONTEND_SECONDS)
        except httpx.HTTPError as exc:
            raise unreachable(exc) from exc

    async def _cards(self, names: Iterable[str]) -> list[WorkerCard] | None:
        """Return what workers say; None if they do not in time."""
        try:
            async with asyncio.timeout(self._workers_seconds):
                return await self._directory.every(names)
        except TimeoutError:
            logger.warning("workers did not describe their models within %g s", self._workers_seconds)
            return None


def merged(listed: Sequence[Model], cards: Sequence[WorkerCard], *, adds: bool = True) -> list[Model]:
    """Return the frontend's models with what workers say; `adds` those that only workers name."""
    told = {name: _described([card for card in cards if name in card.models]) for name in _names(cards)}
    made = [{**model, **told.get(model.get("id", ""), {})} for model in listed]
    known = {model.get("id") for model in listed}
    for card in cards if adds else ():
        for name in card.models:
            if name not in known and not _is_of_frontend(card):
                known.add(name)
                own = {"id": name, "object": "model", "created": BEGAN, "owned_by": OWNER}
                made.append({**own, "context_window": card.max_model_len, **told[name]})
    return made


def of_caller(models: Sequence[Model], listed: Model, allowed: frozenset[str] | None) -> Model:
    """Return those of the models that the caller's key is for, and the ends of the list where it has some."""
    mine = [model for model in models if allowed is None or model.get("id") in allowed]
    ends = {"first_id": mine[0]["id"] if mine else None, "last_id": mine[-1]["id"] if mine else None}
    return {"data": mine, **{name: value for name, value in ends.items() if name in listed}}


def _is_below(path: str, allowed: frozenset[str]) -> bool:
    """Return whether a path is a model, or something below one; a name may have slashes."""
    return any(path == model or path.startswith(model + "/") for model in allowed)


def _is_anthropic(request: Request) -> bool:
    return ANTHROPIC in request.headers


def _is_of_frontend(card: WorkerCard) -> bool:
    """Return whether only the frontend can say that this worker's model is there: it may be leaving."""
    return card.kind != "transcription"


def _names(cards: Sequence[WorkerCard]) -> set[str]:
    return {name for card in cards for name in card.models}


def _described(cards: Sequence[WorkerCard]) -> Model:
    """Return what the workers of one model say together; some only help others."""
    serving = [card for card in cards if card.apis] or list(cards)
    found: Model = {
        "kind": serving[0].kind,
        "apis": list(dict.fromkeys(api for card in serving for api in card.apis)),
    }
    for name in ("task", "dimensions"):
        if (value := getattr(serving[0], name)) is not None:
            found[name] = value
    return found


def _decoded(answer: httpx.Response) -> Model:
    try:
        return msgspec.json.decode(answer.content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _passed_on(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type", JSON))
