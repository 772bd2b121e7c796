"""Workers that write down speech, called as the gateway calls them; the engine is fake."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from harness.media import sound
from harness.plane import plane
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake

pytestmark = pytest.mark.more
ROLE = ("--disaggregation-mode", "transcription")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("speech"), DYN_TCP_MAX_MESSAGE_SIZE=str(64 << 20)) as made:
        words = fake(model, transcription=True, window_seconds=5)
        worker = made.start_worker(*words, *ROLE, "--max-speech-seconds", "900", "--media-max-mb", "32")
        until("ready", partial(made._is_ready, worker))
        yield made


def test_upload_of_25_mb_arrives(served: Stack) -> None:
    file = base64.b64encode(sound(270, 48_000)).decode()
    body = {"_api": "transcription", "model": "tiny", "file": file, "filename": "a.wav", "language": "en"}
    with plane(served.environment()) as workers:
        answer = workers.call("backend.generate", body)
    assert answer["chunks"][-1]["duration"] == 270, answer


def test_frontend_does_not_list_it(served: Stack) -> None:
    served.start_frontend()
    until("a frontend", lambda: served.get("/live").status_code == 200)
    until("the worker", lambda: len(served.instances()) == 1)
    assert served.models() == []


def test_worker_refuses_a_model_of_another_kind(tmp_path: Path, model: Path) -> None:
    with stack(tmp_path) as made:
        for words, message in (
            ((*fake(model), *ROLE), "does not write down speech"),
            (fake(model, transcription=True), "--disaggregation-mode transcription"),
        ):
            worker = made.start_worker(*words)
            assert worker.process.wait(60) == 1
            assert message in worker.log.read_text()
