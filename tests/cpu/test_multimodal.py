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

from cpu.pairs import ENGINE_DATA, NIXL
from cpu.test_two_workers import LONG
from cpu.vision import (
    LONG_TEXT,
    MAX_TOKENS,
    TEXT,
    USERS,
    Parts,
    ask,
    body,
    cases,
    chat,
    film,
    image,
    of_user,
    picture,
    video,
)
from dynamo_vllm.media.base import MediaLimits
from harness.kv_events import heard, known_to_router
from harness.media import data_url, png_that_claims
from harness.stack import Stack, environment, stack
from harness.waiting import until, until_spread
from harness.warm import FORKED, Zygote

WIDE = "qwen2.5-vl"
"""The family with two workers."""
TEXT_MODE, PLAIN, TEXT_ONLY = "text-mode", "plain", "text-only"
"""Further models: the last family in text mode, one without --enable-multimodal, one without vision."""
DECODED = "decoded"
"""LLaVA with images decoded by the frontend, and its own chat template given as a line."""
LINE = "<|im_start|>user\\n<image>\\n<prompt><|im_end|>\\n<|im_start|>assistant\\n"
PAIR = "pair"
"""Prefill and decode workers; both get the images, and one of them encodes them."""
Expected = dict[str, dict[str, tuple[str, int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multimodal")


@pytest.fixture(scope="module")
def bare(warm: Zygote, folder: Path) -> Iterator[Expected]:
    """Returns the answers of bare vLLM, which runs while the workers start."""
    children = {}
    for family in FAMILIES:
        at = folder / f"bare-{family}"
        at.mkdir()
        asked = cases(family) | ({f"user {n}": of_user(n) for n in range(USERS)} if family == WIDE else {})
        (at / "cases.json").write_text(json.dumps(asked))
        model = make_tiny_vision_model(folder / family, family)
        args = [str(model), str(at / "cases.json"), str(at / "out.json")]
        children[family] = warm.fork("cpu.vision:run", args, environment(at, **FORKED), at / "log")
    found: Expected = {}
    for family, child in children.items():
        at = folder / f"bare-{family}"
        assert child.wait(300) == 0, (at / "log").read_text()[-3000:]
        found[family] = {
            name: tuple(made) for name, made in json.loads((at / "out.json").read_text()).items()
        }
    yield found


@pytest.fixture(scope="module")
def served(warm: Zygote, model: Path, folder: Path) -> Iterator[Stack]:
    """Yields one frontend with a model of each family, and models without images."""
    with stack(folder) as made:
        made.start_frontend()

        def start(name: str, of: Path, *flags: str) -> None:
            component = f"of-{name.replace('.', '-')}"
            warm.start_worker(made, of, "--served-model-name", name, "--component", component, *flags)

        limits = ("--enable-multimodal", "--limit-mm-per-prompt", '{"image": 2, "video": 1}')
        for family in FAMILIES:
            of = make_tiny_vision_model(folder / family, family)
            for _ in range(2 if family == WIDE else 1):
                start(family, of, *limits, "--media-networks", "127.0.0.0/8")
        start(TEXT_MODE, folder / "qwen3-vl", *limits, "--use-vllm-tokenizer")
        start(DECODED, folder / "llava", *limits, "--frontend-decoding", "--mm-prompt-template", LINE)
        start(PLAIN, folder / "qwen2-vl")
        start(TEXT_ONLY, model, "--enable-multimodal")
        for role in ("prefill", "decode"):
            flags = ("--served-model-name", PAIR, "--enable-multimodal", *NIXL, role)
            warm.start_worker(made, folder / WIDE, *flags)
        every = (*FAMILIES, TEXT_MODE, DECODED, PLAIN, TEXT_ONLY, PAIR)
        yield made.wait_ready(120).wait_listed(*every).wait_over_two(PAIR)


@pytest.mark.parametrize("case", ["one image", "image last", "large"])
def test_answers_are_the_same_with_pictures_decoded_by_the_frontend(
    served: Stack, bare: Expected, case: str
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
def test_answer_and_usage_equal_bare_vllm(served: Stack, bare: Expected, family: str, case: str) -> None:
    assert ask(served, family, cases(family)[case]) == bare[family][case]


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_change_the_answer(bare: Expected, family: str) -> None:
    """Checks the reference: without this, equality with it would show little."""
    texts = [text for text, _ in bare[family].values()]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("case", cases("qwen3-vl"))
def test_text_mode_equals_token_mode(served: Stack, bare: Expected, case: str) -> None:
    assert ask(served, TEXT_MODE, cases("qwen3-vl")[case]) == bare["qwen3-vl"][case]


def test_eight_users_get_answers_about_their_own_pictures(served: Stack, bare: Expected) -> None:
    """Words and sizes are equal, so only the images differ. The second time they are cached."""
    for _ in range(2):
        with ThreadPoolExecutor(USERS) as pool:
            found = list(pool.map(lambda number: ask(served, WIDE, of_user(number)), range(USERS)))
        assert found == [bare[WIDE][f"user {number}"] for number in range(USERS)]


@pytest.mark.parametrize("case", ["two images", "video and image", "large"])
def test_prefill_and_decode_equal_one_engine(served: Stack, bare: Expected, case: str) -> None:
    asked = body(PAIR, cases(WIDE)[case], nvext=ENGINE_DATA)
    answer = served.post("/v1/chat/completions", asked).json()
    usage = answer["usage"]
    assert (answer["choices"][0]["message"]["content"], usage["prompt_tokens"]) == bare[WIDE][case]
    fetched = answer["nvext"]["engine_data"]["decode_cached_tokens"]
    assert fetched == usage["prompt_tokens"], "not all was fetched"


def test_stream_equals_unary(served: Stack, bare: Expected) -> None:
    parts = cases("qwen3-vl")["two images"]
    more = {"ignore_eos": True}
    chunks = list(
        served.openai.chat.completions.create(
            model="qwen3-vl",
            messages=chat(parts),  # type: ignore[call-overload]
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=more,
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert (text, chunks[-1].usage.prompt_tokens) == bare["qwen3-vl"]["two images"]


def test_two_choices_about_one_picture(served: Stack, bare: Expected) -> None:
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


def test_name_a_client_gives_twice_does_not_mix_pictures(served: Stack, bare: Expected) -> None:
    for case in ("one image", "image last"):
        parts = [
            {**part, "uuid": "mine"} if part["type"] == "image_url" else part for part in cases(WIDE)[case]
        ]
        assert ask(served, WIDE, parts) == bare[WIDE][case]
    other = [{**image(picture(2)), "uuid": "mine"}, TEXT]
    assert ask(served, WIDE, other) == ask(served, WIDE, [image(picture(2)), TEXT])


def test_picture_of_a_refused_request_can_be_asked_about(served: Stack, bare: Expected) -> None:
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


REFUSED: dict[str, tuple[str, Parts, dict[str, Any], int, str]] = {
    "no picture": (WIDE, [image("data:image/png;base64,AAAA"), TEXT], {}, 415, ""),
    "cut picture": (WIDE, [image(picture(1)[:4000]), TEXT], {}, 400, "image 1 of 1"),
    "one of two": (WIDE, [image(picture(1)), image(picture(2)[:4000]), TEXT], {}, 400, "image 2 of 2"),
    "three pictures": (
        WIDE,
        [image(picture(n)) for n in range(3)],
        {},
        400,
        "3 images in one request; this worker takes 2",
    ),
    "video for LLaVA": ("llava", [film("data:video/mp4;base64,AAAA"), TEXT], {}, 400, "takes no videos"),
    "sound": (
        WIDE,
        [{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}, TEXT],
        {},
        400,
        "takes no audio parts",
    ),
    "a name alone": (
        WIDE,
        [{"type": "image_url", "image_url": None, "uuid": "mine"}, TEXT],
        {},
        400,
        "without a URL",
    ),
    "file": (WIDE, [image("file:///etc/hostname"), TEXT], {}, 400, "image 1 of 1"),
    "bomb": (WIDE, [image(data_url(png_that_claims(50_000, 50_000))), TEXT], {}, 413, ""),
    "drawing that can name files": (
        WIDE,
        [image(data_url(b"<svg><image href='file:///etc/passwd'/>")), TEXT],
        {},
        415,
        "",
    ),
    "this machine": (TEXT_MODE, [image("http://127.0.0.1:9/a.png"), TEXT], {}, 400, ""),
    "metadata of a cloud": (WIDE, [image("http://169.254.169.254/latest"), TEXT], {}, 400, ""),
    "settings of the processor": (
        WIDE,
        [image(picture(1)), TEXT],
        {"mm_processor_kwargs": {"min_pixels": 10**10}},
        400,
        "mm_processor_kwargs",
    ),
    "odd shape": (WIDE, [image(picture(1, 1000, 4)), TEXT], {}, 400, "aspect ratio must be smaller than 200"),
    "without --enable-multimodal": (
        PLAIN,
        [image(picture(1)), TEXT],
        {},
        400,
        "started without --enable-multimodal",
    ),
    "model without vision": (TEXT_ONLY, [image(picture(1)), TEXT], {}, 400, "this model takes text only"),
    "sound in text mode": (
        TEXT_MODE,
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, TEXT],
        {},
        400,
        "takes no audio parts",
    ),
    "three pictures in text mode": (TEXT_MODE, [image(picture(n)) for n in range(3)], {}, 400, "takes 2"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_and_the_engine_goes_on(served: Stack, kind: str) -> None:
    model, parts, more, status, said = REFUSED[kind]
    found = served.post("/v1/chat/completions", body(model, parts, **more))
    assert (found.status_code, said in found.text) == (status, True), found.text
    assert ask(served, model, [TEXT])[0]


def test_mark_without_a_picture_is_text(served: Stack) -> None:
    """A client can write the text of a placeholder."""
    for family in FAMILIES:
        marks = [{"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|><|video_pad|><image>"}]
        assert ask(served, family, marks)[0]
        mixed = [*marks, image(picture(1)), TEXT]
        assert served.post("/v1/chat/completions", body(family, mixed)).status_code in (200, 400)
        assert ask(served, family, [TEXT])[0]


def test_start_says_that_a_text_model_takes_no_media(served: Stack) -> None:
    logs = [worker.log.read_text() for worker in served.workers]
    assert sum("--enable-multimodal does nothing" in log for log in logs) == 1


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
    asked = {**body(WIDE, [image(picture(500)), TEXT], stream=True, max_tokens=LONG)}
    asked["stream_options"] = {"include_usage": True}

    def stream() -> Iterator[dict[str, Any]]:
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=asked, timeout=30) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    def text(chunks: list[dict[str, Any]]) -> str:
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])

    undisturbed = list(stream())
    rest = stream()
    chunks = [next(rest) for _ in range(20)]
    workers = [w for w in served.workers if f"models=['{WIDE}']" in w.log.read_text()]
    in_flight = "dynamo_component_requests_in_flight"
    (busy,) = until("a busy worker", lambda: [w for w in workers if w.metric(in_flight) > 0])
    os.killpg(busy.pid, signal.SIGKILL)
    chunks += rest
    assert text(chunks) == text(undisturbed)
    keys = ("prompt_tokens", "completion_tokens")
    usages = [[found[-1]["usage"][key] for key in keys] for found in (chunks, undisturbed)]
    assert usages[0] == usages[1]
