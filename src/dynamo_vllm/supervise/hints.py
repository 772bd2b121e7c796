"""Suggests what to try once a model is served."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from dynamo_vllm.models import demo

if TYPE_CHECKING:
    from collections.abc import Collection

CHAT = "/v1/chat/completions"
# 96 × 96 pixels in two colours, short enough for a line.
RED_SQUARE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAGAAAABgAQMAAADYVuV7AAAABlBMVEX////XJibM1/YSAAAAIElEQVR42mNg"
    "GHhg/////wYIkwlZfJQzQJxRMAqGCQAAHEMD+eu9mDEAAAAASUVORK5CYII="
)
_MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "images": ("/v1/images/generations", {"prompt": "a red circle on white"}),
    "videos": ("/v1/videos", {"prompt": "a cat that yawns"}),
    "audios": (CHAT, {"messages": [{"role": "user", "content": "rain on a roof"}]}),
}
"""Example requests for models that generate something other than text, by type of endpoint."""


def to_try(url: str, model: str, endpoint_types: Collection[str], needs_key: bool = False) -> list[str]:
    """Return example commands for this model, which answers on these types of endpoints."""
    for kind, (path, body) in _MADE.items():
        if kind in endpoint_types:
            return [f"try: {_curl(url + path, {'model': model, **body}, needs_key)}"]
    if model == demo.served_name("vision"):
        asked = _asked(model, _about_an_image("What colour is the square?"))
        return [f"try: {_curl(url + CHAT, asked, needs_key)}"]
    curl = _curl(url + CHAT, _asked(model, "What is 17 + 25?"), needs_key)
    return [f"try: {curl}"] if needs_key else [f"try: dynamo-vllm chat {url}", f"or:  {curl}"]


def _asked(model: str, content: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": content}]}


def _about_an_image(question: str) -> list[dict[str, object]]:
    return [{"type": "image_url", "image_url": {"url": RED_SQUARE}}, {"type": "text", "text": question}]


def _curl(url: str, body: dict[str, object], needs_key: bool) -> str:
    words = ["curl", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return shlex.join(words) + (' -H "Authorization: Bearer $KEY"' if needs_key else "")
