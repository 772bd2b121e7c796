"""The frontend's models and what workers say of them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

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
