"""Provides images, chats about them, and answers for tests of media in real engines."""

from __future__ import annotations

import base64
import functools
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from harness.stack import Stack

if TYPE_CHECKING:
    from cpu.children import Child, Children

Parts = list[dict[str, Any]]
TEXT = {"type": "text", "text": "ba be bi"}
LONG_TEXT = {"type": "text", "text": "ba be bi bo " * 12}
MAX_TOKENS = 12
USERS = 8


@functools.cache
def picture(seed: int, width: int = 112, height: int = 84) -> str:
    """Returns a data: URL of an image of noise."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@functools.cache
def video(seed: int, frames: int = 12) -> str:
    """Returns a data: URL of a video of noise."""
    import cv2

    chance = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.mp4")
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 4.0, (64, 64))
        for _ in range(frames):
            coarse = chance.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            writer.write(cv2.resize(coarse, (64, 64), interpolation=cv2.INTER_NEAREST))
        writer.release()
        return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def film(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def cases(family: str) -> dict[str, Parts]:
    found = {
        "text": [TEXT],
        "one image": [image(picture(1)), TEXT],
        "image last": [TEXT, image(picture(1))],
        "two images": [image(picture(1)), image(picture(2, 56, 140)), TEXT],
        "the same twice": [image(picture(1)), TEXT, image(picture(1))],
        "large": [image(picture(3, 640, 480)), LONG_TEXT],
    }
    if family != "llava":
        found |= {
            "video": [film(video(1)), TEXT],
            "video and image": [film(video(2)), TEXT, image(picture(2))],
        }
    return found


def of_user(number: int) -> Parts:
    """Returns the same words for everybody, with a different image each."""
    return [image(picture(100 + number, 168, 168)), LONG_TEXT]


def chat(parts: Parts) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts}]


def body(model: str, parts: Parts, **more: Any) -> dict[str, Any]:
    asked = {"model": model, "messages": chat(parts), "max_tokens": MAX_TOKENS, "temperature": 0}
    return {**asked, "ignore_eos": True, **more}


def ask(made: Stack, model: str, parts: Parts, **more: Any) -> tuple[str, int]:
    """Returns the text over HTTP, and the number of prompt tokens."""
    found = made.post("/v1/chat/completions", body(model, parts, **more))
    assert found.status_code == 200, found.text
    answer = found.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


Expected = dict[str, tuple[str, int]]
"""The text and the number of prompt tokens by the name of a case."""


def start_bare(children: Children, model: Path, cases: Mapping[str, Parts]) -> Child:
    """Bare vLLM answers while workers start."""
    chats = {name: chat(parts) for name, parts in cases.items()}
    return children.start("bare:chats", str(model), chats, MAX_TOKENS, enable_prefix_caching=False)


def expected(child: Child) -> Expected:
    return {name: (text, len(prompt)) for name, (text, prompt, _) in child.answer().items()}
