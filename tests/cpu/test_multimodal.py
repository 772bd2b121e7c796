"""Tests images and video in real engines: answers equal bare vLLM, no mix-ups, clear refusals."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models.vision import FAMILIES, make_tiny_vision_model

from cpu.children import Child, Children
from cpu.pairs import NIXL
from cpu.stacks import Start
from cpu.streams import LONG, busy_worker
from cpu.vision import (
    LONG_TEXT,
    TEXT,
    USERS,
    Expected,
    Parts,
    ask,
    body,
    cases,
    expected,
    film,
    image,
    of_user,
    picture,
    start_bare,
    video,
)
from dynamo_vllm.media.base import MediaLimits
from harness.kv_events import heard, known_to_router
from harness.media import data_url, png_that_claims
from harness.stack import Stack
from harness.waiting import until_spread

WIDE = "qwen2.5-vl"
"""The family with two workers."""
TEXT_MODE, PLAIN = "text-mode", "plain"
"""Further models: the last family in text mode, and one without --enable-multimodal."""
DECODED = "decoded"
"""LLaVA with images decoded by the frontend, and its own chat template given as a line."""
LINE = "<|im_start|>user\\n<image>\\n<prompt><|im_end|>\\n<|im_start|>assistant\\n"
PAIR = "pair"
"""Prefill and decode workers; both get the images, and one of them encodes them."""
Answers = dict[str, Expected]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("multimodal")
    return {family: make_tiny_vision_model(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def asked_bare(children: Children, models: dict[str, Path]) -> dict[str, Child]:
    """Bare vLLM runs while the workers start."""
    users = {f"user {number}": of_user(number) for number in range(USERS)}
    return {
        family: start_bare(children, model, cases(family) | (users if family == WIDE else {}))
        for family, model in models.items()
    }


@pytest.fixture(scope="module")
def bare(served: Stack, asked_bare: dict[str, Child]) -> Answers:
    return {family: expected(child) for family, child in asked_bare.items()}


@pytest.fixture(scope="module")
def served(start_module: Start, models: dict[str, Path], asked_bare: dict[str, Child]) -> Stack:
    """Returns one frontend with a model of each family, and models without images."""
    made = start_module.frontend()

    def start(name: str, model: Path, *flags: str) -> None:
        component = f"of-{name.replace('.', '-')}"
        named = ("--served-model-name", name, "--component", component)
        start_module.warm.start_worker(made, model, *named, *flags)

    limits = ("--enable-multimodal", "--limit-mm-per-prompt", '{"image": 2, "video": 1}')
    for family in (*FAMILIES, WIDE):
        start(family, models[family], *limits, "--media-networks", "127.0.0.0/8")
    start(TEXT_MODE, models["qwen3-vl"], *limits, "--use-vllm-tokenizer")
    start(DECODED, models["llava"], *limits, "--frontend-decoding", "--mm-prompt-template", LINE)
    start(PLAIN, models["qwen2-vl"])
    for role in ("prefill", "decode"):
        flags = ("--served-model-name", PAIR, "--enable-multimodal", *NIXL, role)
        start_module.warm.start_worker(made, models[WIDE], *flags)
    return made.wait_ready(120).wait_listed(*FAMILIES, TEXT_MODE, DECODED, PLAIN, PAIR).wait_over_two(PAIR)


@pytest.mark.parametrize("case", ["one image", "image last", "large"])
def test_answers_are_the_same_with_pictures_decoded_by_the_frontend(
    served: Stack, bare: Answers, case: str
) -> None:
    parts = cases("llava")[case]
    first = [*parts[1:], parts[0]] if case == "image last" else parts  # the line puts pictures first
    same = ask(served, "llava", first)
    assert ask(served, DECODED, parts) == same
    assert case == "image last" or same == bare["llava"][case]


def test_line_has_one_place_for_pictures(served: Stack) -> None:
    found = served.post("/v1/chat/completions", body(DECODED, cases("llava")["two images"]))
    assert found.status_code == 400 and "lacks a placeholder for every image" in found.text, found.text


CASES = [(family, case) for family in FAMILIES for case in cases(family)]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_answer_and_usage_equal_bare_vllm(served: Stack, bare: Answers, family: str, case: str) -> None:
    assert ask(served, family, cases(family)[case]) == bare[family][case]


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_change_the_answer(bare: Answers, family: str) -> None:
    """Checks the reference: without this, equality with it would show little."""
    texts = [text for text, _ in bare[family].values()]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("case", cases("qwen3-vl"))
def test_text_mode_equals_token_mode(served: Stack, bare: Answers, case: str) -> None:
    assert ask(served, TEXT_MODE, cases("qwen3-vl")[case]) == bare["qwen3-vl"][case]


def test_eight_users_get_answers_about_their_own_pictures(served: Stack, bare: Answers) -> None:
    """Words and sizes are equal, so only the images differ. The second time they are cached."""
    for _ in range(2):
        with ThreadPoolExecutor(USERS) as pool:
            found = list(pool.map(lambda number: ask(served, WIDE, of_user(number)), range(USERS)))
        assert found == [bare[WIDE][f"user {number}"] for number in range(USERS)]


@pytest.mark.parametrize("case", ["two images", "video and image", "large"])
def test_prefill_and_decode_equal_one_engine(served: Stack, bare: Answers, case: str) -> None:
    asked = body(PAIR, cases(WIDE)[case], nvext={"extra_fields": ["engine_data"]})
    answer = served.post("/v1/chat/completions", asked).json()
    usage = answer["usage"]
    assert (answer["choices"][0]["message"]["content"], usage["prompt_tokens"]) == bare[WIDE][case]
    fetched = answer["nvext"]["engine_data"]["decode_cached_tokens"]
    assert fetched == usage["prompt_tokens"], "not all was fetched"


def stream(made: Stack, model: str, parts: Parts, **more: Any) -> Iterator[dict[str, Any]]:
    asked = body(model, parts, stream=True, stream_options={"include_usage": True}, **more)
    with httpx.stream("POST", f"{made.url}/v1/chat/completions", json=asked, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def streamed_text(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_stream_equals_unary(served: Stack, bare: Answers) -> None:
    chunks = list(stream(served, "qwen3-vl", cases("qwen3-vl")["two images"]))
    answer = streamed_text(chunks), chunks[-1]["usage"]["prompt_tokens"]
    assert answer == bare["qwen3-vl"]["two images"]


def test_two_choices_about_one_picture(served: Stack, bare: Answers) -> None:
    parts = cases("qwen2-vl")["one image"]
    answer = served.post("/v1/chat/completions", body("qwen2-vl", parts, n=2, temperature=0.8, seed=4)).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 2 and all(texts)
    assert answer["usage"]["prompt_tokens"] == bare["qwen2-vl"]["one image"][1]


def routed(made: Stack, parts: Parts, **more: Any) -> tuple[int, int]:
    """Returns which worker answered, and how many tokens it had cached."""
    asked = body(WIDE, parts, nvext={"extra_fields": ["worker_id"], **more})
    answer = made.post("/v1/chat/completions", asked).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["nvext"]["worker_id"]["decode_worker_id"], cached


def routed_first(made: Stack, parts: Parts, **more: Any) -> tuple[int, int]:
    """The same for a new prompt; afterwards the router knows who has it."""
    with known_to_router(made):
        return routed(made, parts, **more)


def test_repeated_picture_is_asked_where_it_is_cached(served: Stack) -> None:
    def parts(number: int) -> Parts:
        return [image(picture(500 + number, 224, 224)), LONG_TEXT]

    first = until_spread(lambda number: routed_first(served, parts(number)), lambda answer: answer[0])
    assert {cached for _, cached in first} == {0}, "other pictures were taken for these"
    again = [routed(served, parts(number)) for number in range(len(first))]
    assert [worker for worker, _ in again] == [worker for worker, _ in first]
    assert all(cached >= 96 for _, cached in again)


def test_words_before_a_picture_count_where_the_router_does_not_know_it(served: Stack) -> None:
    """With a `uuid` the frontend has no name for the image; its blocks must still be in KV events."""
    words = {"type": "text", "text": "".join(f"{number} bo " for number in range(40))}
    first = routed_first(served, [words, {**image(picture(210)), "uuid": "a"}, TEXT])
    again = routed(served, [words, {**image(picture(211)), "uuid": "a"}, TEXT])
    assert (again[0], again[1] >= 96) == (first[0], True), (first, again)


@pytest.mark.parametrize(
    ("family", "item"),
    [
        ("llava", lambda seed: image(picture(seed))),
        ("qwen3-vl", lambda seed: {**image(picture(seed)), "uuid": str(seed)}),
        ("qwen3-vl", lambda seed: film(video(seed))),
    ],
    ids=["image of another family", "image with a uuid", "video"],
)
def test_router_keeps_prompts_apart_whose_media_it_does_not_know(
    served: Stack, family: str, item: Callable[[int], dict[str, Any]]
) -> None:
    """Blocks that look like others get lost, and those behind them then have no parent."""
    lost = functools.partial(heard, served, event_type="stored", status="parent_block_not_found")
    before = lost()
    for seed in (220, 221):
        for longer in ([], [LONG_TEXT], [LONG_TEXT, LONG_TEXT]):
            with known_to_router(served):
                ask(served, family, [item(seed), LONG_TEXT, *longer])
    assert lost() == before


def test_salt_keeps_the_same_picture_apart(served: Stack) -> None:
    parts = [image(picture(300, 224, 224)), LONG_TEXT]
    ways = (routed_first, routed)
    found = [way(served, parts, cache_salt=salt)[1] >= 96 for salt in "ab" for way in ways]
    assert found == [False, True, False, True]


def test_name_a_client_gives_twice_does_not_mix_pictures(served: Stack, bare: Answers) -> None:
    for case in ("one image", "image last"):
        parts = [
            {**part, "uuid": "mine"} if part["type"] == "image_url" else part for part in cases(WIDE)[case]
        ]
        assert ask(served, WIDE, parts) == bare[WIDE][case]
    other = [{**image(picture(2)), "uuid": "mine"}, TEXT]
    assert ask(served, WIDE, other) == ask(served, WIDE, [image(picture(2)), TEXT])


def test_picture_of_a_refused_request_can_be_asked_about(served: Stack, bare: Answers) -> None:
    """The prompt is too long only with the image, so vLLM's core never got it."""
    fresh = image(picture(400))
    long = {"type": "text", "text": "x" * 2024}
    refused = served.post("/v1/chat/completions", body("llava", [fresh, long]))
    assert refused.status_code == 400 and "this model takes 2048" in refused.text, refused.text
    found = ask(served, "llava", [fresh, TEXT])
    assert found == ask(served, "llava", [image(picture(400)), TEXT])
    assert found[1] == bare["llava"]["one image"][1]
    worker = next(w for w in served.workers if "llava" in w.log.read_text())
    assert worker.log.read_text().count("its media are sent again") == 1


SOUND = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
THREE = [image(picture(number)) for number in range(3)]
REFUSED: dict[str, tuple[str, Parts, int, str]] = {
    "cut picture": (WIDE, [image(picture(1)[:4000])], 400, "image 1 of 1"),
    "one of two": (WIDE, [image(picture(1)), image(picture(2)[:4000])], 400, "image 2 of 2"),
    "three pictures": (WIDE, THREE, 400, "3 images in one request; this worker takes 2"),
    "video for LLaVA": ("llava", [film("data:video/mp4;base64,AAAA")], 400, "takes no videos"),
    "sound": (WIDE, [SOUND], 400, "takes no audio parts"),
    "bomb": (WIDE, [image(data_url(png_that_claims(50_000, 50_000)))], 413, ""),
    "this machine": (TEXT_MODE, [image("http://127.0.0.1:9/a.png")], 400, ""),
    "odd shape": (WIDE, [image(picture(1, 1000, 4))], 400, "aspect ratio must be smaller than 200"),
    "without --enable-multimodal": (PLAIN, THREE[:1], 400, "started without --enable-multimodal"),
    "sound in text mode": (TEXT_MODE, [INPUT_AUDIO], 400, "takes no audio parts"),
    "three pictures in text mode": (TEXT_MODE, THREE, 400, "takes 2"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_and_the_engine_goes_on(served: Stack, kind: str) -> None:
    model, parts, status, said = REFUSED[kind]
    answer = served.post("/v1/chat/completions", body(model, [*parts, TEXT]))
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert ask(served, model, [TEXT])[0]


def test_mark_without_a_picture_is_text(served: Stack) -> None:
    """A client can write the text of a placeholder."""
    for family in FAMILIES:
        marks = [{"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|><|video_pad|><image>"}]
        assert ask(served, family, marks)[0]
        mixed = [*marks, image(picture(1)), TEXT]
        assert served.post("/v1/chat/completions", body(family, mixed)).status_code in (200, 400)
        assert ask(served, family, [TEXT])[0]


def test_client_that_leaves_ends_the_fetch(served: Stack) -> None:
    """The frontend does not fetch videos, so only the worker connects."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(("127.0.0.1", served.port)) as client,
    ):
        server.settimeout(60)
        asked = json.dumps(body(WIDE, [film(f"http://127.0.0.1:{server.getsockname()[1]}/slow.mp4")]))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n{asked}".encode())
        connection, _ = server.accept()
        with connection:
            connection.settimeout(MediaLimits().timeout_seconds / 2)
            assert connection.recv(65536).startswith(b"GET /slow.mp4")
            client.close()
            assert connection.recv(10) == b"", "the worker still waits for the video"


def test_killed_worker_in_mid_stream(served: Stack) -> None:
    """The other worker processes the image again and continues. Must be last: one worker is gone then."""
    parts = [image(picture(500)), TEXT]
    undisturbed = list(stream(served, WIDE, parts, max_tokens=LONG))
    rest = stream(served, WIDE, parts, max_tokens=LONG)
    chunks = [next(rest) for _ in range(20)]
    workers = [w for w in served.workers if f"models=['{WIDE}']" in w.log.read_text()]
    os.killpg(busy_worker(workers).pid, signal.SIGKILL)
    chunks += rest
    assert streamed_text(chunks) == streamed_text(undisturbed)
    keys = ("prompt_tokens", "completion_tokens")
    usages = [[told[-1]["usage"][key] for key in keys] for told in (chunks, undisturbed)]
    assert usages[0] == usages[1]
