"""The frontend's models and what workers say of them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.apis.models import Models, merged
from dynamo_vllm.serving.calls.card import WorkerCard

LISTED = [{"id": "chat", "owned_by": "nvidia"}, {"id": "new", "owned_by": "nvidia"}]


def card(*models: str, apis: tuple[str, ...], kind: str = "generate") -> WorkerCard:
    return WorkerCard(models=models, apis=apis, kind=kind, max_model_len=7)


def test_helpers_add_nothing_to_what_a_model_is_for() -> None:
    found = merged(LISTED, [card("chat", apis=()), card("chat", apis=("chat", "completions"))])
    assert found[0] == {**LISTED[0], "kind": "generate", "apis": ["chat", "completions"]}
    assert found[1] == LISTED[1], "no worker has said anything of it yet"


def test_only_models_that_the_frontend_never_lists_are_added() -> None:
    workers = [
        card("gone", apis=("chat",)),
        card("whisper", apis=("transcriptions",), kind="transcription"),
        card("whisper", apis=("transcriptions",), kind="transcription"),
    ]
    found = merged(LISTED, workers)
    assert [one["id"] for one in found] == ["chat", "new", "whisper"]
    assert found[2]["apis"] == ["transcriptions"] and found[2]["context_window"] == 7


class Silent:
    """Workers that do not answer."""

    async def every(self, names: object) -> list[WorkerCard]:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v1/models", 200, {"object": "list", "data": LISTED}),
        ("/v1/models", 503, {"message": "not yet"}),
        ("/v1/models/chat", 200, LISTED[0]),
        ("/v1/models/a%2Fb%3Fc/ready", 200, {"ready": True}),
        ("/v1/models/none", 404, {"message": "no such model"}),
    ],
)
async def test_answer_of_the_frontend_passes_while_workers_are_silent(
    path: str, status: int, body: dict[str, Any]
) -> None:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(status, json=body)

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://f") as frontend:
        silent: Any = Silent()
        routes = Models(frontend, silent, workers_seconds=0.01).routes()
        own = httpx.ASGITransport(Starlette(routes=routes))
        async with httpx.AsyncClient(transport=own, base_url="http://g") as client:
            found = await client.get(path + "?limit=5")
    assert (found.status_code, found.json()) == (status, body)
    assert asked == [f"{path}?limit=5".encode()]


def list_of(key_models: tuple[str, ...] | None, cards: list[WorkerCard] | None) -> tuple[Any, dict[str, str]]:
    class Workers:
        async def every(self, names: object) -> list[WorkerCard]:
            return cards if cards is not None else await Silent().every(names)

    headers = {} if key_models is None else {identity.MODELS: identity.models_text(key_models)}
    return Workers(), headers


@pytest.mark.parametrize("cards", [[card("whisper", apis=(), kind="transcription")], None])
@pytest.mark.parametrize(
    ("path", "status", "ids"),
    [("/v1/models", 200, ["new"]), ("/v1/models/new", 200, None), ("/v1/models/chat", 404, None)],
)
async def test_a_key_for_some_models_sees_no_others(
    cards: list[WorkerCard] | None, path: str, status: int, ids: list[str] | None
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        page = {"object": "list", "data": LISTED, "first_id": "chat", "last_id": "new"}
        return httpx.Response(200, json=page if request.url.path == "/v1/models" else LISTED[1])

    workers, headers = list_of(("new", "gone"), cards)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://f") as frontend:
        routes = Models(frontend, workers, workers_seconds=0.01).routes()
        own = httpx.ASGITransport(Starlette(routes=routes))
        async with httpx.AsyncClient(transport=own, base_url="http://own") as client:
            reply = await client.get(path, headers=headers)
    assert reply.status_code == status
    if ids is not None:
        assert [model["id"] for model in reply.json()["data"]] == ids
        assert (reply.json()["first_id"], reply.json()["last_id"]) == ("new", "new")
