"""Media that must wait: in the loader, and through the real frontend."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models.vision import make_tiny_vision_model

from cpu.vision import chat, film, image
from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.base import MediaLimits, MediaRef
from dynamo_vllm.media.decode import image as pictures
from harness import media
from harness.stack import Stack
from harness.waiting import until
from runtime.conftest import MakeLoader, StartFake

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model") / "tiny", "qwen2-vl")


def ask(made: Stack, part: dict[str, Any]) -> httpx.Response:
    asked = {"model": "tiny", "messages": chat([part]), "max_tokens": 2}
    return made.post("/v1/chat/completions", asked)


def test_who_waits_behind_a_slow_server_is_told_to_come_again_and_may(
    deployment: Stack, start_fake: StartFake
) -> None:
    """The slow one has a video: the frontend (1.6.1) asks for pictures itself, before the worker does."""
    limits = ("--media-at-once", "1", "--media-queue-seconds", "0.5", "--media-timeout-seconds", "60")
    start_fake(
        "--enable-multimodal", "--media-networks", "127.0.0.0/8", *limits, media={"image": 1, "video": 1}
    )
    deployment.wait_ready()
    picture = image(media.data_url(media.picture(size=(64, 64))))
    assert ask(deployment, picture).status_code == 200
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, deployment, film(f"http://127.0.0.1:{silent.getsockname()[1]}/a.mp4"))
        silent.settimeout(60)
        peer, _ = silent.accept()
        with peer:
            assert ask(deployment, picture).status_code == 503
            assert not slow.done()
        assert slow.result(60).status_code == 400, "its server has hung up"
    until("it may come again", lambda: ask(deployment, picture).status_code == 200)


async def test_waiting_for_a_thread_takes_nothing_from_the_time_of_an_item(
    make: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one keeps the only thread for longer than it may; the second has waited as long."""
    decode, begun, go_on = pictures.decode, threading.Event(), threading.Event()

    def slowly(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return decode(*given)

    monkeypatch.setattr("dynamo_vllm.media.decode.image.decode", slowly)
    loader = make(MediaLimits(timeout_seconds=1), threads=1)
    refs = [MediaRef("image", media.data_url(media.picture(size=(9 + n, 8)))) for n in range(2)]
    first = asyncio.create_task(loader.load(refs[0]))
    assert await asyncio.to_thread(begun.wait, 60)
    second = asyncio.create_task(loader.load(refs[1]))
    with pytest.raises(MediaRefused, match="within 1 s"):
        await first
    await asyncio.wait({second}, timeout=0.05)
    go_on.set()
    assert (await second).kind == "image"
