"""Encode workers over the real runtime with the fake engine: in turn, and without those that are gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from tiny_models.vision import make_tiny_vision_model

from cpu.vision import chat, image, picture
from harness.bad_server import Answer, BadServer, head, silent, whole
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from runtime.conftest import StartFake

pytestmark = pytest.mark.more

TAKES = {"media": {"image": 2}}
LOST = "dynamo_component_encodings_lost_total"
LOADING_SECONDS, ENCODER_SECONDS = 5.0, 4.5
GONE = head("404 Not Found", "Content-Length: 0")
OF_A_WORKER = b"User-Agent: dynamo-vllm/"


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Stack]:
    """Its frontend leaves addresses to the workers."""
    with stack(tmp_path) as made:
        made.start_frontend(env={"DYN_MM_ALLOW_INTERNAL": "1"})
        yield made


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


def test_worker_says_at_its_start_what_it_encodes_itself(
    deployment: Stack, start_fake: StartFake, tmp_path: Path
) -> None:
    flags = ("--enable-multimodal", "--ec-storage-path", str(tmp_path / "encoded"))
    for way, takes, here in (
        ("--route-to-encoder", {"image": 2, "video": 1, "audio": 1}, "audio and video"),
        ("--route-to-encoder", {"image": 2, "video": 0}, None),
        ("--ec-consumer-mode", {"image": 2, "video": 1, "audio": 1}, None),
    ):
        worker = start_fake(*flags, way, media=takes)
        until("the worker", worker.is_ready)
        words = [f"this worker encodes {here} itself (--ec-consumer-mode sends all)"] if here else []
        said = [line for line in worker.log.read_text().splitlines() if "encode workers get only" in line]
        assert [word in line for word, line in zip(words, said, strict=True)] == [True] * len(words)


def for_workers(answer: Answer, server: BadServer) -> Answer:
    """Frontend 1.6.1 asks for the first bytes of a picture itself and waits for them: not here."""

    async def chosen(writer: asyncio.StreamWriter) -> None:
        await (answer if OF_A_WORKER in server.requests[-1] else GONE)(writer)

    return chosen


async def test_media_that_an_encoder_refuses_are_the_clients_fault(
    deployment: Stack, start_fake: StartFake, tmp_path: Path, server: BadServer
) -> None:
    """Refused with its status, asked for once, within one limit; no encoder is lost by it."""
    flags = (
        *("--enable-multimodal", "--ec-storage-path", str(tmp_path / "encoded"), "--media-max-mb", "0.01"),
        *("--media-networks", "127.0.0.0/8", "--media-timeout-seconds", str(LOADING_SECONDS)),
        *("--encoder-seconds", str(ENCODER_SECONDS)),
    )
    ways = {"hand": "--route-to-encoder", "connector": "--ec-consumer-mode"}
    asking = {
        way: start_fake(*flags, flag, "--served-model-name", way, "--component", way, **TAKES)
        for way, flag in ways.items()
    }
    for _ in range(2):
        start_fake(*flags, "--disaggregation-mode", "encode", **TAKES)
    await asyncio.to_thread(lambda: deployment.wait_ready().wait_listed(*ways))
    answers = {
        "/gone": (GONE, 400, "image 1 of 1: the server answered with status 404"),
        "/page": (whole(b"<html>"), 415, ""),
        "/large": (head("200 OK", "Content-Length: 20000"), 413, ""),
        "/slow": (silent, 400, f"image 1 of 1: not loaded within {LOADING_SECONDS:g} s"),
    }
    for path, (answer, _, _) in answers.items():
        for way in ways:
            server.serve(f"{path}-{way}", for_workers(answer, server))

    async def ask_about(path: str, way: str) -> httpx.Response:
        body = {"model": way, "messages": chat([image(server.url(f"{path}-{way}"))]), "max_tokens": 4}
        return await asyncio.to_thread(deployment.post, "/v1/chat/completions", body)

    asked = [(path, way) for path in answers for way in ways]
    results = await asyncio.gather(*(ask_about(path, way) for path, way in asked))
    for (path, way), found in zip(asked, results, strict=True):
        _, status, message = answers[path]
        assert (path, way, found.status_code) == (path, way, status), found.text
        assert message in found.text
    fetched = [request.split(b" ", 2)[1].decode() for request in server.requests if OF_A_WORKER in request]
    assert [fetched.count(f"{path}-hand") for path in answers] == [1] * len(answers)
    assert all(fetched.count(f"{path}-connector") <= 2 for path in answers)  # here, and in one encoder
    assert {way: worker.metric(LOST) for way, worker in asking.items()} == dict.fromkeys(ways, 0)
