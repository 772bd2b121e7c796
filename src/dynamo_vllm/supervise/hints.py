"""Suggests what to try once a model is served."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from dynamo_vllm.models import demo

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    Models = Mapping[str, Collection[str]]
    """The types of endpoints of each model."""

CHAT, TRANSCRIBE = "/v1/chat/completions", "/v1/audio/transcriptions"
CHATS, EMBEDDINGS, RERANK, TRANSCRIPTION = "chat", "embeddings", "rerank", "transcription"
_TRY, _OR = "try: ", "or:  "
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


_POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    EMBEDDINGS: ("/v1/embeddings", {"input": ["How do I load an adapter?", "It rains."]}),
    RERANK: ("/v1/rerank", {"query": "Will it rain?", "documents": ["Take an umbrella.", "Tea is hot."]}),
    "classify": ("/v1/classify", {"input": "It rains."}),
    "pooling": ("/v1/pooling", {"input": "It rains."}),
}
"""Example requests for models that compute vectors, classes or scores, by what they are for."""


def purpose(endpoint_types: Collection[str]) -> str:
    """Return in a word what a model with these types of endpoints is for."""
    if TRANSCRIPTION + "s" in endpoint_types:
        return TRANSCRIPTION
    if RERANK in endpoint_types and EMBEDDINGS not in endpoint_types:
        return RERANK  # a classifier with one class; embeddings can be compared too
    return next((kind for kind in (*_MADE, *_POOLED) if kind in endpoint_types), CHATS)


def named(models: Models) -> str:
    """Return the names of all models, with what those are for that do not generate text."""
    kinds = {name: purpose(types) for name, types in models.items()}
    return ",".join(name if kind == CHATS else f"{name}({kind})" for name, kind in kinds.items())


def for_all(url: str, models: Models, needs_key: bool = False, has_gateway: bool = True) -> list[str]:
    """Return example commands for the first model of each purpose."""
    firsts: dict[str, str] = {}
    for name, types in models.items():
        firsts.setdefault(purpose(types), name)
    lines = []
    if {CHATS, EMBEDDINGS, RERANK} <= firsts.keys() and not needs_key:
        lines.append(f"dynamo-vllm search {url} 'How do I load an adapter?'")
    for kind, name in firsts.items():
        if kind == TRANSCRIPTION and not has_gateway:
            continue
        lines += (line[len(_TRY) :] for line in to_try(url, name, models[name], needs_key))
    return [(_TRY if number == 0 else _OR) + line for number, line in enumerate(lines)]


def to_try(url: str, model: str, endpoint_types: Collection[str], needs_key: bool = False) -> list[str]:
    """Return example commands for this model, which answers on these types of endpoints."""
    kind = purpose(endpoint_types)
    if kind == TRANSCRIPTION:
        words = ["curl", url + TRANSCRIBE, "-F", "file=@speech.wav", "-F", f"model={model}"]
        return [_TRY + shlex.join(words) + _key(needs_key)]
    if kind != CHATS:
        path, body = {**_MADE, **_POOLED}[kind]
        return [_TRY + _curl(url + path, {"model": model, **body}, needs_key)]
    if model == demo.served_name("vision"):
        asked = _asked(model, _about_an_image("What colour is the square?"))
        return [_TRY + _curl(url + CHAT, asked, needs_key)]
    curl = _curl(url + CHAT, _asked(model, "What is 17 + 25?"), needs_key)
    return [_TRY + curl] if needs_key else [f"{_TRY}dynamo-vllm chat {url}", _OR + curl]


def _asked(model: str, content: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": content}]}


def _about_an_image(question: str) -> list[dict[str, object]]:
    return [{"type": "image_url", "image_url": {"url": RED_SQUARE}}, {"type": "text", "text": question}]


def _curl(url: str, body: dict[str, object], needs_key: bool) -> str:
    words = ["curl", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return shlex.join(words) + _key(needs_key)


def _key(is_needed: bool) -> str:
    return ' -H "Authorization: Bearer $KEY"' if is_needed else ""
