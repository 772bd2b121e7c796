"""The request that proves a start, against a small stand-in for the frontend."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dynamo_vllm.cli.running import prove
from dynamo_vllm.errors import StartError
from dynamo_vllm.observe.frontend_client import FrontendClient
from dynamo_vllm.supervise.probe import Probe

ALONE = {"prefill_worker_id": 1, "decode_worker_id": 1}
OVER_TWO = {"prefill_worker_id": 2, "decode_worker_id": 1}


class Frontend:
    """Answers with these workers one after the other, the last one for good; at `only` one path, if given."""

    def __init__(self, *workers: dict[str, int], only: str = "") -> None:
        self.workers = list(workers)
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        frontend = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                frontend.asked.append(body)
                frontend.paths.append(self.path)
                if only:
                    return self._reply({"data": [{}]}, 200 if self.path == only else 404)
                found = frontend.workers.pop(0) if len(frontend.workers) > 1 else frontend.workers[0]
                self._reply({"choices": [{}], "nvext": {"worker_id": found} if "nvext" in body else None})

            def _reply(self, answer: object, status: int = 200) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def served(frontend: Frontend) -> Iterator[None]:
    thread = threading.Thread(target=frontend.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        frontend.server.shutdown()
        thread.join()
        frontend.server.server_close()


TEXT = ("chat", "completions")


async def ask(
    frontend: Frontend, split: set[str], seconds: float = 60, types: tuple[str, ...] = TEXT
) -> None:
    probe = Probe(answer_seconds=30)
    with served(frontend):
        try:
            await probe.first_answer(frontend.url, {"m": types}, split, seconds)
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
    with served(frontend), closing(FrontendClient(frontend.url, 60)) as client:
        _, step = prove.answer(client, "m")
    assert (step.outcome, frontend.paths[-1]) == (prove.OK, path)
    assert "/v1/chat/completions" not in frontend.paths
