"""Pictures, videos and sounds through the real frontend: what reaches the engine, what comes back."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from harness.maker import KINDS, makers
from harness.stack import Stack, environment, stack
from harness.waiting import until


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("makers")) as made:
        made.start_frontend()
        pipeline = made.folder / "pipeline"
        pipeline.mkdir()
        (pipeline / "model_index.json").write_text("{}")  # and no config.json, as in folders of diffusers
        with makers(environment(made.folder), pipeline):
            until("all three listed", lambda: all(f'"{kind}"' in listed(made) for kind in KINDS), 60)
            yield made


def listed(made: Stack) -> str:
    return made.get("/v1/models").text


def spec_of(answer: httpx.Response) -> dict[str, Any]:
    """What the engine was asked for: the content of the one file."""
    assert answer.status_code == 200, answer.text[:500]
    (file,) = answer.json()["data"]
    found: dict[str, Any] = json.loads(base64.b64decode(file["b64_json"]))
    return found


def test_a_picture_is_asked_for_and_comes_back(studio: Stack) -> None:
    body = {"model": "image", "prompt": "a cat", "size": "64x128", "n": 2, "seed": 5, "guidance_scale": 2.5}
    spec = spec_of(studio.post("/v1/images/generations", {**body, "nvext": {"num_inference_steps": 3}}))
    assert (spec["prompt"], spec["width"], spec["height"], spec["n"]) == ("a cat", 64, 128, 2)
    assert (spec["seed"], spec["guidance"], spec["steps"], spec["format"]) == (5, 2.5, 3, "png")


def test_a_video_is_asked_for_and_comes_back(studio: Stack) -> None:
    body = {
        "model": "video",
        "prompt": "a cat",
        "size": "64x64",
        "seconds": 2,
        "nvext": {"fps": 8, "seed": 5},
    }
    answer = studio.post("/v1/videos", body)
    spec = spec_of(answer)
    assert (spec["width"], spec["frames"], spec["fps"], spec["seed"]) == (64, 16, 8, 5)
    assert (answer.json()["status"], answer.json()["data"][0]["output_format"]) == ("completed", "mp4")


def test_a_sound_comes_back_as_a_file(studio: Stack) -> None:
    asked = {"model": "audio", "input": "rain", "voice": "any", "seed": 5, "num_inference_steps": 3}
    answer = studio.post("/v1/audio/speech", asked)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    spec = json.loads(answer.content)
    assert (spec["prompt"], spec["seed"], spec["steps"], spec["format"]) == ("rain", 5, 3, "wav")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_gets_it_as_a_part(studio: Stack, kind: str, stream: bool) -> None:
    body = {"model": kind, "messages": [{"role": "user", "content": "a cat"}], "seed": 5, "stream": stream}
    answer = studio.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text[:500]
    assert f"data:{KINDS[kind]};base64," in answer.text
    assert f'"{kind}_url"' in answer.text


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/images/generations", {"model": "image", "prompt": "a", "size": "60x60"}, "size"),
        ("/v1/images/generations", {"model": "image", "prompt": "a", "n": 5}, "n:"),
        ("/v1/videos", {"model": "video", "prompt": "a", "nvext": {"num_frames": 9999}}, "num_frames"),
        ("/v1/videos", {"model": "video", "prompt": "a", "output_format": "avi"}, "output_format"),
        ("/v1/audio/speech", {"model": "audio", "input": "a", "response_format": "mp3"}, "response_format"),
        ("/v1/audio/speech", {"model": "audio", "input": " "}, "input"),
    ],
)
def test_what_cannot_be_made_is_a_400_with_the_field(
    studio: Stack, path: str, body: dict[str, Any], named: str
) -> None:
    answer = studio.post(path, body)
    assert answer.status_code == 400, answer.text[:300]
    assert named in answer.json()["message"]


def test_a_model_is_not_found_where_it_makes_something_else(studio: Stack) -> None:
    assert studio.post("/v1/videos", {"model": "image", "prompt": "a"}).status_code == 404
