"""The request that proves a start, against a small stand-in for the frontend."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from dynamo_vllm.cli.running import prove
from dynamo_vllm.errors import StartError
from dynamo_vllm.observe.frontend_client import FrontendClient
from dynamo_vllm.supervise.probe import Probe
from harness.json_server import answering

ALONE = {"prefill_worker_id": 1, "decode_worker_id": 1}
OVER_TWO = {"prefill_worker_id": 2, "decode_worker_id": 1}


class Frontend:
    """Answers with these workers one after the other, the last one for good; at `only` one path, if given."""

    def __init__(self, *workers: dict[str, int], only: str = "") -> None:
        self.workers = list(workers)
        self.only = only
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, object]:
        if body is None:
            return 200, {}
        self.asked.append(body)
        self.paths.append(path)
        if self.only:
            return (200 if path == self.only else 404), {"data": [{}]}
        found = self.workers.pop(0) if len(self.workers) > 1 else self.workers[0]
        return 200, {"choices": [{}], "nvext": {"worker_id": found} if "nvext" in body else None}


TEXT = ("chat", "completions")


async def ask(
    frontend: Frontend, split: set[str], seconds: float = 60, types: tuple[str, ...] = TEXT
) -> None:
    probe = Probe(answer_seconds=30)
    with answering(frontend.answer) as url:
        try:
            await probe.first_answer(url, {"m": types}, split, seconds)
        finally:
            await probe.close()


async def test_one_answer_is_enough_for_workers_that_do_all() -> None:
    frontend = Frontend({})
    await ask(frontend, set(), 60)
    assert frontend.asked == [{"model": "m", "prompt": "Hello", "max_tokens": 1}]


async def test_start_is_proven_when_a_prefill_worker_took_part() -> None:
    """The frontend may know the decode worker a moment earlier."""
    frontend = Frontend({"decode_worker_id": 1}, ALONE, OVER_TWO)
    await ask(frontend, {"m"}, 60)
    assert len(frontend.asked) == 3


async def test_prefill_workers_nobody_uses_fail_the_start() -> None:
    with pytest.raises(StartError, match="the first request to m failed: .* without a prefill worker"):
        await ask(Frontend(ALONE), {"m"}, 0.2)


DRAWINGS = {"images": "/v1/images/generations", "videos": "/v1/videos"}


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("types", "only", "paths"),
    [
        (("chat", "images"), DRAWINGS["images"], [DRAWINGS["images"]]),
        (("chat", "videos"), DRAWINGS["videos"], [DRAWINGS["videos"]]),
        (("chat",), CHAT, [CHAT]),
        (("chat", "audios"), CHAT, [CHAT]),
        (TEXT, CHAT, ["/v1/completions", CHAT]),
    ],
)
async def test_a_model_is_asked_where_it_answers_and_for_one_step_of_a_drawing(
    types: tuple[str, ...], only: str, paths: list[str]
) -> None:
    """In a chat it would take all its steps; as text it would be an error that the frontend counts."""
    frontend = Frontend(only=only)
    await ask(frontend, set(), types=types)
    assert frontend.paths == paths
    if only != CHAT:
        assert frontend.asked[0]["nvext"]["num_inference_steps"] == 1


@pytest.mark.parametrize("path", DRAWINGS.values())
def test_a_check_of_a_model_that_draws_asks_for_one_step(path: str) -> None:
    frontend = Frontend(only=path)
    with answering(frontend.answer) as url, closing(FrontendClient(url, 60)) as client:
        _, step = prove.answer(client, "m")
    assert (step.outcome, frontend.paths[-1]) == (prove.OK, path)
    assert "/v1/chat/completions" not in frontend.paths
