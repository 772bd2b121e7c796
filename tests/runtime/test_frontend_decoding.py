"""Pictures that the frontend decodes, over the real runtime and NIXL, with the fake engine."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from tiny_models.vision import make_tiny_vision_model

from cpu.vision import chat, image
from harness.stack import Stack
from runtime.conftest import StartFake

pytestmark = pytest.mark.more

FLAGS = ("--enable-multimodal", "--frontend-decoding", "--media-timeout-seconds", "120")
TAKES = {"media": {"image": 2}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model") / "tiny", "qwen2-vl")


def url(seed: int, format: str = "PNG", mode: str = "RGB", width: int = 60) -> str:
    levels = np.random.default_rng(seed).integers(0, 256, (40, width, len(mode)), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels if len(mode) > 1 else levels[..., 0], mode).save(buffer, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def post(made: Stack, *urls: str) -> httpx.Response:
    asked = {"model": "tiny", "messages": chat([image(each) for each in urls]), "max_tokens": 4}
    return made.post("/v1/chat/completions", asked)


def ask(made: Stack, *urls: str) -> str:
    found = post(made, *urls)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def test_the_worker_sees_the_pixels_whatever_they_were_packed_in(
    deployment: Stack, start_fake: StartFake
) -> None:
    start_fake(*FLAGS, **TAKES)
    deployment.wait_ready()
    first = ask(deployment, url(1))
    assert ask(deployment, url(1, "BMP")) == first  # other bytes, the same pixels
    others = [url(2), url(1, width=80), url(1, mode="L"), url(1, mode="RGBA")]
    assert len({first, *(ask(deployment, other) for other in others)}) == 5
    both = ask(deployment, url(1), url(2))
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: ask(deployment, url(1), url(2)), range(16))) == {both}
