"""The frontend's models and what workers say of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


class Workers:
    """Workers that say what they are for, or do not answer."""

    def __init__(self, cards: list[WorkerCard] | None = None) -> None:
        self.cards = cards

    async def every(self, names: object) -> list[WorkerCard]:
        if self.cards is None:
            await asyncio.Event().wait()
        return self.cards or []


Answer = Callable[[httpx.Request], httpx.Response]


async def asked(path: str, answer: Answer, workers: Any, **headers: str) -> httpx.Response:
    """What the gateway answers in front of a frontend with this answer."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://f") as frontend:
        routes = Models(frontend, workers, workers_seconds=0.01).routes()
        own = httpx.ASGITransport(Starlette(routes=routes))
        async with httpx.AsyncClient(transport=own, base_url="http://g") as client:
            return await client.get(path, headers=headers)


async def test_answer_of_the_frontend_passes_while_workers_are_silent() -> None:
    answers: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("/v1/models", 200, {"object": "list", "data": LISTED}),
        ("/v1/models", 503, {"message": "not yet"}),
        ("/v1/models/chat", 200, LISTED[0]),
        ("/v1/models/a%2Fb%3Fc/ready", 200, {"ready": True}),
        ("/v1/models/none", 404, {"message": "no such model"}),
    )
    for path, status, body in answers:
        paths: list[bytes] = []

        def answer(
            request: httpx.Request, paths: list[bytes] = paths, status: int = status, body: Any = body
        ) -> httpx.Response:
            paths.append(request.url.raw_path)
            return httpx.Response(status, json=body)

        reply = await asked(path + "?limit=5", answer, Workers())
        assert (reply.status_code, reply.json()) == (status, body)
        assert paths == [f"{path}?limit=5".encode()]


@pytest.mark.parametrize("cards", [[card("whisper", apis=(), kind="transcription")], None])
async def test_a_key_for_some_models_sees_no_others(cards: list[WorkerCard] | None) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        page = {"object": "list", "data": LISTED, "first_id": "chat", "last_id": "new"}
        return httpx.Response(200, json=page if request.url.path == "/v1/models" else LISTED[1])

    headers = {identity.MODELS: identity.models_text(("new", "gone"))}
    page = await asked("/v1/models", answer, Workers(cards), **headers)
    models = [model["id"] for model in page.json()["data"]]
    assert (page.status_code, models) == (200, ["new"])
    assert (page.json()["first_id"], page.json()["last_id"]) == ("new", "new")
    assert (await asked("/v1/models/new", answer, Workers(cards), **headers)).status_code == 200
    assert (await asked("/v1/models/chat", answer, Workers(cards), **headers)).status_code == 404
