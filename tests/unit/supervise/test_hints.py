"""What `serve` proposes to try, by what it knows of the model."""

from __future__ import annotations

import base64
import io
import json
import shlex
from typing import Any

import pytest
from PIL import Image

from dynamo_vllm.supervise import hints
from dynamo_vllm.supervise.hints import to_try

URL = "http://127.0.0.1:8000"
TEXT = ("chat", "completions")


def asked(line: str, path: str) -> dict[str, Any]:
    """The body of a line with curl, as a shell reads it."""
    words = shlex.split(line)
    assert words[1:3] == ["curl", URL + path]
    body: dict[str, Any] = json.loads(words[-1])
    return body


def test_what_to_try_can_be_pasted_into_a_shell() -> None:
    chat, curl = to_try(URL, "it's", TEXT)
    assert chat == f"try: dynamo-vllm chat {URL}"
    assert asked(curl, "/v1/chat/completions")["model"] == "it's"


def test_a_model_that_makes_sounds_is_given_a_description() -> None:
    (line,) = to_try(URL, "any", ("chat", "audios"))
    assert asked(line, "/v1/chat/completions")["messages"][0]["content"] == "rain on a roof"


def test_the_demo_that_sees_is_shown_a_red_square() -> None:
    (line,) = to_try(URL, "demo-vision", TEXT)
    assert len(line) < 500
    picture, question = asked(line, "/v1/chat/completions")["messages"][0]["content"]
    assert question["text"] == "What colour is the square?"
    kind, data = picture["image_url"]["url"].split(",")
    assert kind == "data:image/png;base64"
    shown = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    assert (shown.getpixel((25, 25)), shown.getpixel((70, 70))) == ((215, 38, 38), (255, 255, 255))


EMBEDS, RANKS, CLASSIFIES, HEARS = (
    ("embeddings", "pooling", "rerank"),
    ("classify", "pooling", "rerank"),
    ("classify", "pooling"),
    ("transcriptions",),
)


@pytest.mark.parametrize(
    ("types", "path", "field"),
    [
        (("chat", "images"), "/v1/images/generations", "prompt"),
        (("chat", "videos"), "/v1/videos", "prompt"),
        (EMBEDS, "/v1/embeddings", "input"),
        (RANKS, "/v1/rerank", "documents"),
        (CLASSIFIES, "/v1/classify", "input"),
        (("pooling",), "/v1/pooling", "input"),
    ],
)
def test_a_model_gets_a_request_of_its_own_api(types: tuple[str, ...], path: str, field: str) -> None:
    (line,) = to_try(URL, "any", types)
    body = asked(line, path)
    assert body["model"] == "any" and body[field]


def test_a_model_that_transcribes_gets_a_file() -> None:
    (line,) = to_try(URL, "any", HEARS)
    words = shlex.split(line)
    assert words[1:3] == ["curl", f"{URL}/v1/audio/transcriptions"]
    assert "file=@speech.wav" in words and "model=any" in words
    (line,) = to_try(URL, "any", HEARS, needs_key=True)
    assert line.endswith('-H "Authorization: Bearer $KEY"')


def test_ready_line_says_what_models_are_for() -> None:
    models = {"a": TEXT, "b": EMBEDS, "c": RANKS, "d": CLASSIFIES, "e": HEARS, "f": ("chat", "images")}
    found = "a,b(embeddings),c(rerank),d(classify),e(transcription),f(images)"
    assert hints.named(models) == found


def test_every_purpose_gets_its_lines_once() -> None:
    lines = hints.for_all(URL, {"a": TEXT, "b": EMBEDS, "c": RANKS, "c2": RANKS, "e": HEARS})
    assert lines[0].startswith("try: dynamo-vllm search http://")
    assert lines[1].startswith("or:  dynamo-vllm chat ")
    paths = [word for line in lines[2:] for word in line.split() if word.startswith(URL)]
    assert [path.removeprefix(URL) for path in paths] == [
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/audio/transcriptions",
    ]
    assert hints.for_all(URL, {"e": HEARS}, has_gateway=False) == []
    three = {"a": TEXT, "b": EMBEDS, "c": RANKS}
    assert "search" in hints.for_all(URL, three)[0]
    assert "search" not in "".join(hints.for_all(URL, three, needs_key=True))
