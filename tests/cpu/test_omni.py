"""Pipelines of vLLM-Omni on CPU through the whole stack: text, pictures, and both in two stages."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from harness.stack import Stack, Worker, stack, survivors
from harness.waiting import until

try:
    for package in ("vllm-omni", "vllm-omni-cpu"):
        metadata.version(package)
except metadata.PackageNotFoundError:
    pytest.skip("DYNAMO_VLLM_EXTRAS=omni make venv", allow_module_level=True)

from PIL import Image

from dynamo_vllm.models.tiny_image import make_tiny_image_model

START_SECONDS = 200
LONG = 900
"""Steps of a picture that would take twenty seconds."""
PROMPTS = [
    f"{word} {n}" for n in range(4) for word in ("The quick", "once upon", "hello", "cat and", "1 2 3")
]


OLDER = """\
stage_args:
  - stage_id: 0
    stage_type: llm
    runtime: {process: true, devices: "0", max_batch_size: 16}
    engine_args: {model_stage: thinker, worker_type: ar, max_model_len: 1024, max_num_batched_tokens: 128}
    final_output: true
    final_output_type: text
"""


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One frontend for workers with a model each."""
    with stack(tmp_path_factory.mktemp("omni")) as made:
        made.start_frontend()
        yield made


def started(omni: Stack, name: str, model: Path, *flags: str) -> Worker:
    # A component each: workers of one component are taken for copies of each other.
    named = ["--served-model-name", name, "--component", name]
    worker = omni.start_worker("--omni", "--model", str(model), *named, *flags)
    until(f"{name} ready", lambda: omni._alive(worker) and worker.is_ready(), START_SECONDS)
    until(f"{name} listed", lambda: name in omni.get("/v1/models").text, 30)
    return worker


@pytest.fixture(scope="module")
def writer(omni: Stack, model: Path) -> Worker:
    """Its stages are in a file from before vLLM-Omni 0.30."""
    stages = omni.folder / "stages.yaml"
    stages.write_text(OLDER)
    return started(omni, "writer", model, "--stage-configs-path", str(stages))


@pytest.fixture(scope="module")
def painter(omni: Stack) -> Worker:
    model = make_tiny_image_model(omni.folder / "sd")
    return started(omni, "painter", model, "--max-picture-steps", str(LONG))


@pytest.fixture(scope="module")
def studio(omni: Stack) -> Worker:
    return started(omni, "studio", make_tiny_image_model(omni.folder / "sd-rewriter", rewriter=True))


def draw(omni: Stack, **body: Any) -> httpx.Response:
    asked = {"model": "painter", "prompt": "a cat", "size": "64x64", "num_inference_steps": 2, **body}
    return omni.post("/v1/images/generations", asked)


def pictures(answer: httpx.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text[:500]
    return [base64.b64decode(item["b64_json"]) for item in answer.json()["data"]]


def opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def test_text_equals_plain_vllm_on_20_prompts(omni: Stack, writer: Worker, one_worker: Stack) -> None:
    def said(where: Stack, name: str, prompt: str) -> tuple[str, str, dict[str, Any]]:
        body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        found = where.post("/v1/completions", body).json()
        usage = {k: found["usage"][k] for k in ("prompt_tokens", "completion_tokens")}
        return found["choices"][0]["text"], found["choices"][0]["finish_reason"], usage

    with ThreadPoolExecutor(4) as users:
        ours = list(users.map(lambda prompt: said(omni, "writer", prompt), PROMPTS))
        plain = list(users.map(lambda prompt: said(one_worker, "tiny", prompt), PROMPTS))
    assert ours == plain
    assert len({text for text, _, _ in ours}) > 10


def test_a_seeded_prompt_in_several_steps_does_not_end_the_stage(omni: Stack, writer: Worker) -> None:
    body = {
        "model": "writer",
        "prompt": "once upon a time " * 40,
        "max_tokens": 8,
        "temperature": 1,
        "seed": 5,
    }
    first, again = (omni.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(2))
    assert first == again


def test_an_older_stage_file_is_translated_with_a_word(writer: Worker) -> None:
    said = writer.log.read_text()
    assert "is a stage file from before vLLM-Omni 0.30; it was translated" in said
    assert "  max_num_batched_tokens: 128" in said


def test_text_streams_token_by_token(omni: Stack, writer: Worker) -> None:
    stream = omni.openai.chat.completions.create(
        model="writer",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    deltas = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert len([text for text in deltas if text]) > 3


@pytest.mark.parametrize("size", ["64x64", "128x64"])
def test_a_picture_has_the_asked_size(omni: Stack, painter: Worker, size: str) -> None:
    (content,) = pictures(draw(omni, size=size))
    image = opened(content)
    assert (image.format, f"{image.width}x{image.height}") == ("PNG", size)


def test_the_seed_decides_the_picture(omni: Stack, painter: Worker) -> None:
    first, again, other = (pictures(draw(omni, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert pictures(draw(omni)) != pictures(draw(omni))  # no seed: another one every time


def test_steps_and_guidance_reach_the_pipeline(omni: Stack, painter: Worker) -> None:
    plain = pictures(draw(omni, seed=1))
    assert pictures(draw(omni, seed=1, num_inference_steps=3)) != plain
    assert pictures(draw(omni, seed=1, guidance_scale=9.0)) != plain
    assert pictures(draw(omni, seed=9, nvext={"seed": 1})) == plain


def test_several_pictures_formats_and_urls(omni: Stack, painter: Worker) -> None:
    first, second = pictures(draw(omni, n=2, seed=3))
    assert first != second
    answer = draw(omni, output_format="jpeg", response_format="url").json()
    head, _, code = answer["data"][0]["url"].partition(",")
    assert head == "data:image/jpeg;base64"
    assert opened(base64.b64decode(code)).format == "JPEG"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_gets_pictures_as_parts(omni: Stack, painter: Worker, stream: bool) -> None:
    body = {
        "model": "painter",
        "messages": [{"role": "user", "content": "a cat"}],
        "seed": 1,
        "mm_processor_kwargs": {"size": "64x64", "num_inference_steps": 2},
        "stream": stream,
    }
    answer = omni.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text[:500]
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = next(c for c in (json.loads(x)["choices"][0]["delta"]["content"] for x in lines) if c)
    else:
        parts = answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["usage"]["prompt_tokens"] > 0
    url = parts[0]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]) == pictures(draw(omni, seed=1))[0]


def test_eight_users_at_a_time(omni: Stack, painter: Worker) -> None:
    with ThreadPoolExecutor(8) as users:
        together = list(users.map(lambda seed: pictures(draw(omni, seed=seed)), range(8)))
    assert together == [pictures(draw(omni, seed=seed)) for seed in range(8)]


def test_a_client_that_leaves_frees_the_stage(omni: Stack, painter: Worker) -> None:
    with pytest.raises(httpx.ReadTimeout):
        asked = {"model": "painter", "prompt": "a cat", "size": "64x64", "num_inference_steps": LONG}
        httpx.post(f"{omni.url}/v1/images/generations", json=asked, timeout=1.5)
    began = time.monotonic()
    pictures(draw(omni, num_inference_steps=1))
    assert time.monotonic() - began < 1.5  # a second, and the time of the picture itself


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"size": "0x0"}, "size"),
        ({"size": "60x60"}, "size"),
        ({"size": "100000x100000"}, "size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 10**6}, "num_inference_steps"),
        ({"n": 0}, "n:"),
        ({"n": 100}, "n:"),
        ({"response_format": "gif"}, "gif"),
        ({"output_format": "tiff"}, "tiff"),
        ({"prompt": "word " * 200}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"guidance_scale": -1}, "guidance_scale"),
    ],
)
def test_bad_input_is_refused_by_name(
    omni: Stack, painter: Worker, change: dict[str, Any], named: str
) -> None:
    answer = draw(omni, **change)
    assert answer.status_code == 400, answer.text[:300]
    assert named in answer.json()["message"]
    assert pictures(draw(omni))


def test_metrics_tell_of_the_stages(painter: Worker) -> None:
    text = httpx.get(f"http://127.0.0.1:{painter.system_port}/metrics", timeout=30).text
    assert "dynamo_component_requests_running" in text
    assert "vllm_omni:requests_success_total" in text


def test_a_text_stage_rewrites_the_prompt_of_the_drawing_stage(omni: Stack, studio: Worker) -> None:
    answer = draw(omni, model="studio", seed=1)
    (content,) = pictures(answer)
    assert opened(content).size == (64, 64)
    assert answer.json()["data"][0]["revised_prompt"]
    assert pictures(draw(omni, model="studio", seed=1)) == [content]
    assert pictures(draw(omni, model="studio", seed=1, prompt="a dog")) != [content]


# --- the last tests: they end the workers ---------------------------------------------------------------


def test_a_killed_text_stage_ends_its_worker(writer: Worker) -> None:
    kill_a_stage(writer)


def test_a_killed_drawing_stage_ends_its_worker(painter: Worker) -> None:
    kill_a_stage(painter)


def kill_a_stage(worker: Worker) -> None:
    below = psutil.Process(worker.pid).children(recursive=True)
    stage = next(p for p in below if "resource_tracker" not in " ".join(p.cmdline()))
    began = time.monotonic()
    os.kill(stage.pid, signal.SIGKILL)
    assert worker.process.wait(20) == 3
    assert time.monotonic() - began < 10
    assert survivors(below, 10) == []
