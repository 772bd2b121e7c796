"""Workers that write down speech, called as the gateway calls them; the engine is fake."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.media import sound
from harness.plane import Plane, plane
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from runtime.conftest import fake

pytestmark = pytest.mark.more

IN_FLIGHT = "dynamo_component_requests_in_flight"


def start(deployment: Stack, model: Path, *flags: str, **spec: Any) -> Worker:
    words = fake(model, transcription=True, window_seconds=5, **spec)
    worker = deployment.start_worker(*words, "--disaggregation-mode", "transcription", *flags)
    until("ready", partial(deployment._is_ready, worker), 60)
    return worker


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("speech"), DYN_TCP_MAX_MESSAGE_SIZE=str(64 << 20)) as made:
        start(made, model, "--max-speech-seconds", "900", "--media-max-mb", "32")
        yield made


@pytest.fixture(scope="module")
def workers(served: Stack) -> Iterator[Plane]:
    with plane(served.environment()) as made:
        yield made


def body(data: bytes, **more: Any) -> dict[str, Any]:
    file = base64.b64encode(data).decode()
    return {"_api": "transcription", "model": "tiny", "file": file, "filename": "a.wav", **more}


def ask(workers: Plane, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    answer = workers.call("backend.generate", asked)
    assert "error" not in answer, answer
    return "".join(chunk["text"] for chunk in answer["chunks"]), answer["chunks"][-1]


def test_text_comes_in_pieces_and_the_rest_at_the_end(workers: Plane) -> None:
    chunks = workers.call("backend.generate", body(sound(12, 16_000), language="en", stream=True))["chunks"]
    text = "".join(chunk["text"] for chunk in chunks)
    assert len(chunks) > 12
    assert len(text.split()) >= 12
    assert text == " ".join(text.split())
    last = chunks[-1]
    assert (last["done"], last["language"], last["duration"], last["words"]) == (True, "en", 12, None)
    assert last["usage"]["completion_tokens"] == len(text.split())


def test_upload_of_25_mb_arrives(workers: Plane) -> None:
    assert ask(workers, body(sound(270, 48_000), language="en"))[1]["duration"] == 270


def test_frontend_does_not_list_it(served: Stack) -> None:
    served.start_frontend()
    until("a frontend", lambda: served.get("/live").status_code == 200)
    until("the worker", lambda: len(served.instances()) == 1)
    assert served.models() == []


def test_client_that_leaves_ends_its_request(tmp_path: Path, model: Path) -> None:
    with stack(tmp_path) as made:
        worker = start(made, model, token_ms=200)
        with plane(made.environment()) as leaving, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(leaving.call, "backend.generate", body(sound(500)))
            until("a running request", lambda: worker.metric(IN_FLIGHT) == 1)
            leaving.process.kill()
            with pytest.raises(ValueError):  # there is no answer
                answer.result(30)
        until("an end of the request", lambda: worker.metric(IN_FLIGHT) == 0)
        assert worker.is_ready()


def test_worker_refuses_a_model_of_another_kind(tmp_path: Path, model: Path) -> None:
    with stack(tmp_path) as made:
        worker = made.start_worker(*fake(model), "--disaggregation-mode", "transcription")
        assert worker.process.wait(60) == 1
        assert "does not write down speech" in worker.log.read_text()
        other = made.start_worker(*fake(model, transcription=True))
        assert other.process.wait(60) == 1
        assert "--disaggregation-mode transcription" in other.log.read_text()
