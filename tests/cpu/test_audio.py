"""Tests audio in real engines: answers equal bare vLLM, no mix-ups, and refusals that name the cause."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import struct
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tiny_models.audio_input import RATE, SECONDS, make_tiny_audio_input_model

from cpu.children import Child, Children
from cpu.stacks import Start
from cpu.vision import LONG_TEXT, TEXT, Expected, Parts, ask, body, expected, image, picture, start_bare
from harness import media
from harness.bad_server import bad_server
from harness.media import data_url
from harness.stack import Stack

pytestmark = pytest.mark.more

TOKENS, TEXT_MODE = "tokens", "text-mode"
"""The same model twice: tokenised by the frontend, and with vLLM's tokenizer."""
USERS = 4
MAX_SECONDS = 40


def samples(seed: int, seconds: float, rate: int = RATE, channels: int = 1) -> np.ndarray[Any, Any]:
    """Returns a melody with a new tone every tenth of a second."""
    tones = np.random.default_rng(seed).uniform(100, 4000, (int(seconds * 10) + 1, channels))
    each = np.repeat(tones, rate // 10, axis=0)[: int(seconds * rate)]
    made: np.ndarray[Any, Any] = 0.3 * np.sin(2 * np.pi * np.cumsum(each, axis=0) / rate)
    return made


@functools.cache
def wav(seed: int, seconds: float = 1.0, rate: int = RATE, channels: int = 1) -> bytes:
    return media.wav((samples(seed, seconds, rate, channels) * 32767).astype("<i2").tobytes(), rate, channels)


def flac(seed: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples(seed, 1.0), RATE, format="FLAC")
    return buffer.getvalue()


def floats(value: float) -> bytes:
    """Returns a WAV file of half a second."""
    body = struct.pack("<f", value) * (RATE // 2)
    form = struct.pack("<HHIIHH", 3, 1, RATE, RATE * 4, 4, 32)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def sound(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(data, f"audio/{kind}")}}


def input_audio(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def of_user(number: int) -> Parts:
    """Returns the same words for everybody, with different audio of the same length."""
    return [sound(wav(100 + number, 4.0)), LONG_TEXT]


CASES: dict[str, Parts] = {
    "text": [TEXT],
    "one": [sound(wav(1)), TEXT],
    "another": [sound(wav(2)), TEXT],
    "last": [TEXT, sound(wav(1))],
    "two": [sound(wav(1)), sound(wav(2, 0.5)), TEXT],
    "the other way round": [sound(wav(2, 0.5)), sound(wav(1)), TEXT],
    "the same twice": [sound(wav(1)), TEXT, sound(wav(1))],
    "stereo": [sound(wav(3, channels=2)), TEXT],
    "flac": [sound(flac(4), "flac"), TEXT],
    "all of the window": [sound(wav(5, SECONDS)), TEXT],
    **{f"user {number}": of_user(number) for number in range(USERS)},
}
OTHER_RATE: Parts = [sound(wav(6, rate=44_100)), TEXT]
if find_spec("torchaudio") is not None:
    CASES["another rate"] = OTHER_RATE


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_audio_input_model(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture(scope="module")
def asked_bare(children: Children, model_folder: Path) -> Child:
    """Bare vLLM with its own fetching and decoding answers while the workers start."""
    return start_bare(children, model_folder, CASES)


@pytest.fixture(scope="module")
def bare(served: Stack, asked_bare: Child) -> Expected:
    return expected(asked_bare)


@pytest.fixture(scope="module")
def served(start_module: Start, model_folder: Path, asked_bare: Child) -> Stack:
    flags = (
        "--enable-multimodal",
        *("--limit-mm-per-prompt", '{"audio": 2}'),
        *("--media-networks", "127.0.0.0/8"),
        *("--media-max-seconds", str(MAX_SECONDS)),
    )
    made = start_module.frontend()
    for name, more in ((TOKENS, ()), (TEXT_MODE, ("--use-vllm-tokenizer",))):
        named = ("--served-model-name", name, "--component", name)
        start_module.warm.start_worker(made, model_folder, *named, *flags, *more)
    return made.wait_ready(120).wait_listed(TOKENS, TEXT_MODE)


def cached(made: Stack, parts: Parts) -> int:
    """Returns how many tokens of the prompt were cached."""
    answer = made.post("/v1/chat/completions", body(TOKENS, parts)).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_sounds_change_the_answer(bare: Expected) -> None:
    """Checks the reference: without this, equality with it would show little."""
    texts = [text for text, _ in bare.values()]
    assert len(set(texts)) == len(texts), bare


@pytest.mark.parametrize("case", CASES)
def test_answer_and_usage_equal_bare_vllm(served: Stack, bare: Expected, case: str) -> None:
    for model in (TOKENS, TEXT_MODE):
        assert ask(served, model, CASES[case]) == bare[case], model


def test_input_audio_in_text_mode_is_the_same_sound(served: Stack, bare: Expected) -> None:
    assert ask(served, TEXT_MODE, [input_audio(wav(1)), TEXT]) == bare["one"]
    assert ask(served, TEXT_MODE, [input_audio(wav(1)), sound(wav(2, 0.5)), TEXT]) == bare["two"]


async def test_sound_of_a_server(served: Stack, bare: Expected) -> None:
    async with bad_server() as server:
        url = server.file("/a.wav", wav(1))
        parts: list[dict[str, Any]] = [{"type": "audio_url", "audio_url": {"url": url}}, TEXT]
        for model in (TOKENS, TEXT_MODE):
            assert await asyncio.to_thread(ask, served, model, parts) == bare["one"]


def test_a_longer_sound_takes_more_of_the_prompt(served: Stack) -> None:
    """The model makes 25 tokens of a second."""
    counts = [ask(served, TOKENS, [sound(wav(7, seconds)), TEXT])[1] for seconds in (1, 2, 5)]
    assert [count - counts[0] for count in counts] == [0, 25, 100]


def test_only_the_same_sound_is_found_in_the_cache(served: Stack) -> None:
    one, other = ([sound(wav(seed, 4.0)), LONG_TEXT] for seed in (201, 202))
    assert cached(served, one) == 0
    assert cached(served, one) >= 96
    assert cached(served, other) == 0, "the sound of another was taken for this one"


def test_users_get_answers_about_their_own_sounds(served: Stack, bare: Expected) -> None:
    for model in (TOKENS, TEXT_MODE):
        with ThreadPoolExecutor(USERS) as pool:
            found = list(pool.map(lambda number: ask(served, model, of_user(number)), range(USERS)))  # noqa: B023
        assert found == [bare[f"user {number}"] for number in range(USERS)]


NO_BASE64 = {"type": "input_audio", "input_audio": {"data": "%", "format": "wav"}}
TOO_LONG, CUT = wav(1, SECONDS + 1), sound(wav(2)[:4000])
REFUSED: dict[str, tuple[str, Parts, int, str]] = {
    "no audio": (TOKENS, [sound(b"hello")], 415, ""),
    "cut off": (TOKENS, [CUT], 400, "audio 1 of 1: the WAV is cut off"),
    "the second of two": (TOKENS, [sound(wav(1)), CUT], 400, "audio 2 of 2"),
    "too short for the model": (TOKENS, [sound(wav(1, 0.01))], 400, "too short"),
    "too long for the model": (TOKENS, [sound(TOO_LONG)], 400, "31.0 s; this model accepts up to 30 s"),
    "too long, in text mode": (TEXT_MODE, [input_audio(TOO_LONG)], 400, "this model accepts up to 30 s"),
    "too long for the worker": (TOKENS, [sound(wav(1, MAX_SECONDS + 1))], 413, ""),
    "three": (
        TOKENS,
        [sound(wav(n)) for n in range(3)],
        400,
        "3 audio parts in one request; this worker takes 2",
    ),
    "a picture": (TOKENS, [image(picture(1))], 400, "this model takes no images"),
    "input_audio in token mode": (TOKENS, [input_audio(wav(1))], 400, "input_audio"),
    "input_audio beside audio_url": (TOKENS, [sound(wav(1)), input_audio(wav(2))], 400, "send audio_url"),
    "no base64": (TEXT_MODE, [NO_BASE64], 400, "audio 1 of 1"),
}
if "another rate" not in CASES:
    REFUSED["another rate, with nothing to change it"] = (
        TOKENS,
        OTHER_RATE[:1],
        400,
        "accepts only 16000 Hz",
    )


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_and_the_engine_goes_on(served: Stack, bare: Expected, kind: str) -> None:
    model, parts, status, said = REFUSED[kind]
    answer = served.post("/v1/chat/completions", body(model, [*parts, TEXT]))
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert ask(served, model, [TEXT]) == bare["text"]


@pytest.mark.parametrize("level", [0.0, 2.0**31], ids=["silence", "the loudest"])
def test_odd_levels_have_an_answer(served: Stack, level: float) -> None:
    assert ask(served, TOKENS, [sound(floats(level)), TEXT])[0]
