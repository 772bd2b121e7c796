"""Encode workers over the real runtime with the fake engine: in turn, and without those that are gone."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
from tiny_models.vision import make_tiny_vision_model

from cpu.vision import chat, image, picture
from harness.stack import Stack, Worker
from harness.waiting import until
from runtime.conftest import StartFake

pytestmark = pytest.mark.more

TAKES = {"media": {"image": 2}}
LOST = "dynamo_component_encodings_lost_total"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The frontend reads its chat template."""
    return make_tiny_vision_model(tmp_path_factory.mktemp("model") / "tiny", "qwen2-vl")


def ask(made: Stack, number: int) -> str:
    body = {"model": "tiny", "messages": chat([image(picture(number))]), "max_tokens": 4}
    found = made.post("/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def encoded(worker: Worker) -> int:
    return worker.log.read_text().count("media to encode")


def test_encoders_take_turns_and_one_that_ends_is_not_missed(
    deployment: Stack, start_fake: StartFake, tmp_path: Path
) -> None:
    flags = ("--enable-multimodal", "--ec-storage-path", str(tmp_path / "encoded"), "--log-level", "debug")
    asking = start_fake(*flags, "--route-to-encoder", **TAKES)
    encoders = [start_fake(*flags, "--disaggregation-mode", "encode", **TAKES) for _ in range(2)]
    deployment.wait_ready()
    assert deployment.models() == ["tiny"]
    others = itertools.count(100)

    def is_known(encoder: Worker) -> bool:
        ask(deployment, next(others))
        return encoded(encoder) > 0

    for encoder in encoders:  # the asking worker hears of each in its own time
        until("an encoder in use", partial(is_known, encoder))
    before, lost = [encoded(encoder) for encoder in encoders], asking.metric(LOST)
    answers = [ask(deployment, number) for number in range(4)]
    after = [encoded(encoder) for encoder in encoders]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 2]
    assert asking.metric(LOST) == lost

    encoders[0].signal(15)
    assert encoders[0].process.wait(60) == 0
    assert [ask(deployment, number) for number in range(4)] == answers
    assert encoded(encoders[1]) - before[1] >= 4 and asking.metric(LOST) == lost

    encoders[1].signal(15)
    assert encoders[1].process.wait(60) == 0
    assert ask(deployment, 0) == answers[0]
    until("the count", lambda: asking.metric(LOST) == lost + 1)
