"""Generates small media, as a client would send them."""

from __future__ import annotations

import base64
import io
import wave
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo_vllm.media.base import Kind

SIDE = 96
_RATE = 16_000


def url(kind: Kind) -> str | None:
    """Return a data: URL; None for videos, which a child process decodes each time, so nothing is built for
    them."""
    make = _MAKERS.get(kind)
    return make() if make is not None else None


def _image() -> str:
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (90, 120, 150)).save(made, "PNG")
    return _url("image/png", made.getvalue())


def _audio() -> str:
    """A second of silence."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(bytes(2 * _RATE))
    return _url("audio/wav", made.getvalue())


def _url(type: str, content: bytes) -> str:
    return f"data:{type};base64,{base64.b64encode(content).decode()}"


_MAKERS: Mapping[str, Callable[[], str]] = {"image": _image, "audio": _audio}
