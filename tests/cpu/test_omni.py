"""Tests vLLM-Omni pipelines on CPU through the whole stack: text, images, both in two stages, videos, audio.

Most of the time goes into the start of one worker for each; what needs still more processes is marked long.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import threading
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from demo.image.measure import look
from demo.image.scenes import COLOURS

from cpu.completions import complete
from harness import listening
from harness.bad_pictures import BAD_PICTURES
from harness.omni import lacks, skip
from harness.processes import survivors
from harness.served import served
from harness.stack import Stack, Worker, stack
from harness.waiting import Promptness, until

if lacks("vllm-omni", "vllm-omni-cpu"):
    skip()

import av
from PIL import Image
from tiny_models.audio_output import RATE, SAMPLES, make_tiny_audio_output_model
from tiny_models.image import make_tiny_image_model, make_tiny_video_model

from dynamo_vllm.config.topology import Topology
from dynamo_vllm.models import demo as models
from dynamo_vllm.supervise.planning import demos

START_SECONDS = 200
ONE_AT_A_TIME = threading.Lock()
LONG = 900
"""The steps of an image that would take twenty seconds."""
PROMPTS = [
    f"{word} {n}" for n in range(4) for word in ("The quick", "once upon", "hello", "cat and", "1 2 3")
]


OLDER = """\
stage_args:
  - stage_id: 0
    stage_type: llm
    runtime: {process: true, devices: "0", max_batch_size: 16}
    engine_args:
      model_stage: thinker
      worker_type: ar
      max_model_len: 1024
      max_num_batched_tokens: 128
      num_gpu_blocks_override: 1024
    final_output: true
    final_output_type: text
"""


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Yields one frontend for workers with one model each."""
    with stack(tmp_path_factory.mktemp("omni")) as made:
        made.start_frontend()
        yield made


def started(omni: Stack, name: str, model: Path, *flags: str) -> Worker:
    # A component each: workers of one component are taken for copies of each other.
    named = ["--served-model-name", name, "--component", name]
    with ONE_AT_A_TIME:  # the stack numbers its workers
        worker = omni.start_worker("--omni", "--model", str(model), *named, *flags)
    until(f"{name} ready", lambda: omni._alive(worker) and worker.is_ready(), START_SECONDS)
    omni.wait_listed(name)
    return worker


def start_writer(omni: Stack, model: Path) -> Worker:
    """Starts a pipeline with a stage file from before vLLM-Omni 0.30."""
    stages = omni.folder / "stages.yaml"
    stages.write_text(OLDER)
    return started(omni, "writer", model, "--stage-configs-path", str(stages))


def start_teller(omni: Stack, model: Path) -> Worker:
    """Has the tokenizer in the worker, and no stage file."""
    small = ["--max-model-len", "1024", "--num-gpu-blocks-override", "1024"]
    return started(omni, "teller", model, "--use-vllm-tokenizer", *small)


def start_painter(omni: Stack, _: Path) -> Worker:
    """Starts the demo model for images as `serve --demo image` does, with another name."""
    (group,) = demos.put_in(Topology(), demos.DEMOS["image"], {}, "cpu").workers
    assert group.options["omni"] is True
    return started(omni, "painter", models.folder("image"), *group.args, "--max-picture-steps", str(LONG))


def start_studio(omni: Stack, _: Path) -> Worker:
    """Has a monitor that hardly ever checks: a job is to notice a dead stage."""
    model = make_tiny_image_model(omni.folder / "sd-rewriter", rewriter=True)
    seldom = ["--health-seconds", "600", "--canary-seconds", "600"]
    return started(omni, "studio", model, "--max-picture-steps", str(LONG), *seldom)


STARTS: dict[str, Callable[[Stack, Path], Worker]] = {
    "writer": start_writer,
    "teller": start_teller,
    "painter": start_painter,
    "studio": start_studio,
    "filmer": lambda omni, _: started(omni, "filmer", make_tiny_video_model(omni.folder / "video")),
    "singer": lambda omni, _: started(omni, "singer", make_tiny_audio_output_model(omni.folder / "audio")),
}


@pytest.fixture(scope="module")
def workers(omni: Stack, model: Path, request: pytest.FixtureRequest) -> dict[str, Future[Worker]]:
    """Starts those that the chosen tests ask for, two at a time: a start keeps one core busy."""
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = {name for item in chosen if item.path == request.path for name in item.fixturenames}
    with ThreadPoolExecutor(2) as starting:
        return {name: starting.submit(STARTS[name], omni, model) for name in STARTS if name in wanted}


def fixture_of(name: str) -> Any:
    @pytest.fixture(scope="module", name=name)
    def worker(workers: dict[str, Future[Worker]]) -> Worker:
        return workers[name].result()

    return worker


writer, teller, painter, studio, filmer, singer = map(fixture_of, STARTS)


def draw(omni: Stack, **body: Any) -> httpx.Response:
    asked = {"model": "painter", "prompt": "a cat", "size": "64x64", "num_inference_steps": 2, **body}
    return omni.post("/v1/images/generations", asked)


def of_chat(omni: Stack, model: str, prompt: str, kind: str, **more: Any) -> bytes:
    """Returns what a chat got as a part."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], **more}
    answer = omni.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text[:500]
    if more.get("stream"):
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = next(c for c in (json.loads(x)["choices"][0]["delta"]["content"] for x in lines) if c)
    else:
        parts = answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["usage"]["prompt_tokens"] > 0 or kind != "image_url"
    (part,) = parts
    return base64.b64decode(part[kind]["url"].partition(",")[2])


def pictures(answer: httpx.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text[:500]
    return [base64.b64decode(item["b64_json"]) for item in answer.json()["data"]]


def opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


@pytest.mark.long
def test_text_equals_plain_vllm_on_20_prompts(omni: Stack, writer: Worker, one_worker: Stack) -> None:
    def said(where: Stack, name: str, prompt: str) -> tuple[str, list[str], int, int]:
        answer = complete(where, prompt, 16, model=name)
        return answer.text, answer.finishes, answer.prompt_tokens, answer.tokens

    with ThreadPoolExecutor(4) as users:
        ours = list(users.map(lambda prompt: said(omni, "writer", prompt), PROMPTS))
        plain = list(users.map(lambda prompt: said(one_worker, "tiny", prompt), PROMPTS))
    assert ours == plain
    assert len({text for text, *_ in ours}) > 10


def test_a_seeded_prompt_in_several_steps_does_not_end_the_stage(omni: Stack, writer: Worker) -> None:
    prompt = "once upon a time " * 40
    first, again = (complete(omni, prompt, model="writer", temperature=1, seed=5).text for _ in range(2))
    assert first == again


def test_an_older_stage_file_is_translated_with_a_word(writer: Worker) -> None:
    said = writer.log.read_text()
    assert "is a stage file from before vLLM-Omni 0.30; it was translated" in said
    assert "  max_num_batched_tokens: 128" in said


@pytest.mark.parametrize("stream", [False, True])
def test_text_mode_equals_token_mode(omni: Stack, writer: Worker, teller: Worker, stream: bool) -> None:
    def said(name: str) -> tuple[str, str | None]:
        body: dict[str, Any] = {
            "model": name,
            "messages": [{"role": "user", "content": "tell me a story"}],
            "max_tokens": 12,
            "temperature": 0,
        }
        if not stream:
            (choice,) = omni.openai.chat.completions.create(**body).choices
            return choice.message.content, choice.finish_reason
        chunks = [c.choices[0] for c in omni.openai.chat.completions.create(**body, stream=True) if c.choices]
        pieces = [chunk.delta.content for chunk in chunks if chunk.delta.content]
        assert len(pieces) > 3
        return "".join(pieces), chunks[-1].finish_reason

    assert said("teller") == said("writer")


def test_a_pipeline_listens_for_this_machine_only(omni: Stack, painter: Worker) -> None:
    pictures(draw(omni))
    until("loopback only", lambda: listening.for_other_machines(omni.pids()) == [])


@pytest.mark.parametrize(
    ("prompt", "figure"),
    [
        ("a red circle on white", ("red", "circle", "white")),
        ("draw a big yellow star on a black background", ("yellow", "star", "black")),
        ("请画一个绿色的三角形，黄色背景", ("green", "triangle", "yellow")),
    ],
)
def test_the_picture_shows_what_was_asked_for(
    omni: Stack, painter: Worker, prompt: str, figure: tuple[str, str, str]
) -> None:
    body = {"model": "painter", "prompt": prompt, "nvext": {"seed": 1, "num_inference_steps": 8}}
    (content,) = pictures(omni.post("/v1/images/generations", body))
    image = opened(content)
    assert image.size == (64, 64)
    seen = look(np.asarray(image.convert("RGB")), COLOURS)
    assert seen is not None and (seen.colour, seen.shape, seen.background) == figure


def test_a_picture_has_the_asked_size(omni: Stack, painter: Worker) -> None:
    (content,) = pictures(draw(omni, size="128x64"))
    image = opened(content)
    assert (image.format, image.size) == ("PNG", (128, 64))


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
    settings = {"size": "64x64", "num_inference_steps": 2}
    content = of_chat(
        omni, "painter", "a cat", "image_url", seed=1, mm_processor_kwargs=settings, stream=stream
    )
    assert content == pictures(draw(omni, seed=1))[0]


def test_eight_users_at_a_time(omni: Stack, painter: Worker) -> None:
    with ThreadPoolExecutor(8) as users:
        together = list(users.map(lambda seed: pictures(draw(omni, seed=seed)), range(8)))
    assert together == [pictures(draw(omni, seed=seed)) for seed in range(8)]


def test_a_client_that_leaves_frees_the_stage(omni: Stack, painter: Worker) -> None:
    freed = Promptness()
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            asked = {"model": "painter", "prompt": "a cat", "size": "64x64", "num_inference_steps": LONG}
            httpx.post(f"{omni.url}/v1/images/generations", json=asked, timeout=1.5)
        freed.until("a picture", lambda: pictures(draw(omni, num_inference_steps=1)))
    freed.assert_within(1.5)  # a second, and the time of the picture itself


@pytest.mark.parametrize(("change", "named"), BAD_PICTURES)
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


def film(omni: Stack, **body: Any) -> httpx.Response:
    asked = {"model": "filmer", "prompt": "a cat", "size": "64x64", **body}
    return omni.post("/v1/videos", asked)


def frames_of(content: bytes) -> tuple[int, int, float, int]:
    with av.open(io.BytesIO(content)) as file:
        (stream,) = file.streams.video
        return stream.width, stream.height, float(stream.average_rate or 0), len(list(file.decode(stream)))


def test_a_video_has_the_asked_size_length_and_rate(omni: Stack, filmer: Worker) -> None:
    settings: dict[str, Any] = {"num_frames": 4, "fps": 8, "num_inference_steps": 1, "seed": 1}
    answer = film(omni, nvext=settings)
    assert answer.status_code == 200, answer.text[:500]
    (made,) = answer.json()["data"]
    content = base64.b64decode(made["b64_json"])
    assert (made["output_format"], frames_of(content)) == ("mp4", (64, 64, 8.0, 4))
    linked = film(omni, nvext={**settings, "seed": 2}, response_format="url").json()["data"][0]["url"]
    head, _, code = linked.partition(",")
    assert head == "data:video/mp4;base64"
    assert base64.b64decode(code) != content

    settings = {"size": "64x64", **settings}
    assert of_chat(omni, "filmer", "a cat", "video_url", mm_processor_kwargs=settings) == content


def test_video_that_cannot_be_made_is_refused_by_name(omni: Stack, filmer: Worker) -> None:
    """`tests/runtime/test_media_made.py` has every refusal."""
    answer = film(omni, nvext={"num_frames": 100_000})
    assert answer.status_code == 400, answer.text[:300]
    assert "num_frames" in answer.json()["message"]


def sing(omni: Stack, **body: Any) -> bytes:
    asked = {"model": "singer", "input": "rain", "num_inference_steps": 2, "seed": 1, **body}
    answer = omni.post("/v1/audio/speech", asked)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav"), answer.text[:500]
    return answer.content


def test_audio_is_a_wav_file_that_prompt_and_seed_decide(omni: Stack, singer: Worker) -> None:
    content = sing(omni)
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert len(samples) == SAMPLES
    assert samples.std() > 1000  # not silence
    assert sing(omni) == content
    others = {sing(omni, input="wind"), sing(omni, seed=2), sing(omni, num_inference_steps=3)}
    assert len(others - {content}) == 3

    steps = {"num_inference_steps": 2}
    assert of_chat(omni, "singer", "rain", "audio_url", seed=1, mm_processor_kwargs=steps) == content


# --- the last tests: they end the workers ---------------------------------------------------------------


def test_a_killed_text_stage_ends_its_worker(writer: Worker) -> None:
    kill_a_stage(writer)


def test_a_killed_drawing_stage_ends_its_worker(painter: Worker) -> None:
    kill_a_stage(painter)


def test_a_drawing_stage_of_two_that_is_killed_at_work_ends_its_worker(omni: Stack, studio: Worker) -> None:
    with ThreadPoolExecutor(1) as users:
        asked = users.submit(draw, omni, model="studio", num_inference_steps=LONG)
        running = "dynamo_component_requests_running"
        until("it runs", lambda: studio.metric(running) > 0 or asked.done())
        kill_a_stage(studio, "DiffusionWorker")
        assert asked.result(60).status_code == 503


def kill_a_stage(worker: Worker, name: str = "") -> None:
    below = psutil.Process(worker.pid).children(recursive=True)
    titles = {process: " ".join(process.cmdline()) for process in below}
    stage = next(p for p, title in titles.items() if name in title and "resource_tracker" not in title)
    os.kill(stage.pid, signal.SIGKILL)
    assert worker.process.wait(60) == 3
    assert survivors(below) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_serve_replaces_a_worker_whose_stage_died(tmp_path: Path) -> None:
    model = make_tiny_image_model(tmp_path / "studio", rewriter=True)
    words = ("--omni", str(model), "--served-model-name", "s")
    with served(tmp_path, *words, seconds=START_SECONDS) as serving:
        made, process = serving.stack, serving.process
        first = pictures(draw(made, model="s", seed=1))
        worker = worker_of(process.pid)
        below = worker.children(recursive=True)
        stage = next(p for p in below if "resource_tracker" not in " ".join(p.cmdline()))
        stage.kill()
        assert survivors([worker, *below]) == []
        until("another worker draws", lambda: draw(made, model="s").status_code == 200, START_SECONDS)
        assert worker_of(process.pid).pid != worker.pid
        assert pictures(draw(made, model="s", seed=1)) == first


def worker_of(serve: int) -> psutil.Process:
    return next(p for p in psutil.Process(serve).children() if "worker" in p.cmdline())
