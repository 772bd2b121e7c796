"""Speech in real engines: texts equal bare vLLM's, long sounds, hostile files, clients that leave."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import soundfile
from tiny_models.speech import CONTEXT, LANGUAGES, RATE, SECONDS, make_tiny_speech_model

from cpu.children import Child, Children
from cpu.stacks import Start
from cpu.test_audio import samples as melody
from dynamo_vllm.engine import sound
from harness import media
from harness.plane import Plane, plane
from harness.stack import Stack
from harness.waiting import until
from harness.warm import WARMED

pytestmark = pytest.mark.more

Samples = np.ndarray[Any, Any]
SOUNDS = {"short": 2.0, "middle": 5.5, "whole window": float(SECONDS)}
TIMED = "timed"
LONG = 46.0
_TOKEN = re.compile(r"<\|.*?\|>")


def heard(seed: int, seconds: float) -> Samples:
    """Returns the samples as they are in a WAV file of 16 bits."""
    made: Samples = (melody(seed, seconds)[:, 0] * 32767).astype("<i2").astype(np.float32) / 32768
    return made


def wav(made: Samples, rate: int = RATE) -> bytes:
    return media.wav((made * 32768).astype("<i2").tobytes(), rate)


def long_sound() -> Samples:
    """Returns a sound with pauses, one of them longer than a window."""
    made = heard(9, LONG)
    made[12 * RATE : 34 * RATE] = 0.0
    made[int(8.8 * RATE) : int(9.1 * RATE)] = 0.0
    return made


def body(data: bytes, **more: Any) -> dict[str, Any]:
    file = base64.b64encode(data).decode()
    return {"_api": "transcription", "model": "tiny", "file": file, "language": "en", **more}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_speech_model(tmp_path_factory.mktemp("speech") / "model")


@pytest.fixture(scope="module")
def asked_bare(children: Children, model_folder: Path) -> Child:
    """Bare vLLM answers while the worker starts."""
    cases: dict[str, tuple[Samples, bool]] = {
        name: (heard(seed, seconds), False) for seed, (name, seconds) in enumerate(SOUNDS.items())
    }
    cases[TIMED] = heard(1, SOUNDS["middle"]), True
    long = long_sound()
    for number, (first, last) in enumerate(sound.windows(long, RATE, SECONDS)):
        cases[f"part {number}"] = long[first:last], False
    return children.start("bare:speech", str(model_folder), cases)


@pytest.fixture(scope="module")
def served(start_module: Start, model_folder: Path, asked_bare: Child) -> Stack:
    flags, made = ("--max-model-len", str(CONTEXT), "--max-speech-seconds", "120"), start_module.empty()
    worker = start_module.warm.start_worker(made, model_folder, *flags, env=WARMED)
    until("ready", lambda: made._is_ready(worker), 120)
    return made


@pytest.fixture(scope="module")
def bare(served: Stack, asked_bare: Child) -> dict[str, tuple[str, list[int]]]:
    answers: dict[str, tuple[str, list[int]]] = asked_bare.answer()
    return answers


@pytest.fixture
def workers(served: Stack) -> Iterator[Plane]:
    with plane(served.environment()) as made:
        yield made


def ask(workers: Plane, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the whole text and the last chunk."""
    answer = workers.call("backend.generate", asked)
    assert "error" not in answer, answer
    *pieces, last = answer["chunks"]
    assert last["done"] and not any("done" in piece for piece in pieces)
    return "".join(piece["text"] for piece in pieces) + last["text"], last


def words(text: str) -> str:
    return _TOKEN.sub("", text).strip()


def test_texts_equal_those_of_bare_vllm(workers: Plane, bare: dict[str, tuple[str, list[int]]]) -> None:
    found = {
        name: ask(workers, body(wav(heard(seed, seconds))))[0]
        for seed, (name, seconds) in enumerate(SOUNDS.items())
    }
    assert found == {name: words(bare[name][0]) for name in SOUNDS}
    assert len(set(found.values())) == len(found), "each sound has its own text"


def test_segments_have_the_text_of_bare_vllm(workers: Plane, bare: dict[str, tuple[str, list[int]]]) -> None:
    asked = body(wav(heard(1, SOUNDS["middle"])), response_format="verbose_json")
    text, last = ask(workers, asked)
    segments = last["segments"]
    tokens = [token for segment in segments for token in segment["tokens"]]
    assert tokens == [token for token in bare[TIMED][1] if token in tokens]
    assert "".join(text.split()) == "".join(words(bare[TIMED][0]).split())
    assert all(0 <= one["start"] <= one["end"] <= SOUNDS["middle"] for one in segments)
    assert all(one["avg_logprob"] < 0 for one in segments)


def test_long_sound_is_heard_in_windows(workers: Plane, bare: dict[str, tuple[str, list[int]]]) -> None:
    parts = [words(text) for name, (text, _) in bare.items() if name.startswith("part ")]
    text, last = ask(workers, body(wav(long_sound())))
    kept = sum(last - first for first, last in sound.windows(long_sound(), RATE, SECONDS)) / RATE
    assert len(parts) > 3 and kept < LONG - 5, "silence is left out"
    assert text == " ".join(part for part in parts if part)
    assert last["duration"] == LONG
    tokens = sum(len(ids) for name, (_, ids) in bare.items() if name.startswith("part "))
    assert last["usage"]["completion_tokens"] == tokens
    _, timed = ask(workers, body(wav(long_sound()), response_format="srt"))
    starts = [segment["start"] for segment in timed["segments"]]
    assert starts == sorted(starts)
    assert starts[-1] > 30


def test_language_is_found(workers: Plane) -> None:
    data = wav(heard(1, 5.5))
    text, last = ask(workers, body(data, language=None))
    assert last["language"] in LANGUAGES
    assert ask(workers, body(data, language=last["language"]))[0] == text


def test_hint_changes_the_text(workers: Plane) -> None:
    plain, _ = ask(workers, body(wav(heard(1, 5.5))))
    hinted, last = ask(workers, body(wav(heard(1, 5.5)), prompt="lima <|endoftext|> boro"))
    assert hinted != plain
    assert 4 < last["usage"]["prompt_tokens_details"]["text_tokens"] <= CONTEXT // 2 + 4


def compressed_silence(seconds: int, rate: int = 48_000) -> bytes:
    """Returns a small file that takes much memory when it is decoded."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", rate, 8, format="FLAC", subtype="PCM_16") as file:
        for _ in range(seconds):
            file.write(np.zeros((rate, 8), np.int16))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "why"),
    [(wav(heard(1, 1))[:-1000], "cut off"), (wav(heard(1, 121)), "413"), (compressed_silence(180), "413")],
    ids=["cut", "too long", "compressed"],
)
def test_bad_file_is_refused_and_the_engine_lives(
    workers: Plane, served: Stack, data: bytes, why: str
) -> None:
    """`tests/runtime/test_transcription.py` has every kind."""
    refusal = str(workers.call("backend.generate", body(data))["error"])
    assert "file: " in refusal and why in refusal
    assert served.workers[0].is_ready()


@pytest.mark.parametrize(
    "data",
    [
        wav(heard(1, 0.0001)),
        wav(heard(1, 1), 8000),
        wav(heard(1, 1), 191_999),
        wav(np.zeros(RATE, np.float32)),
    ],
    ids=["one sample", "8 kHz", "192 kHz", "silence"],
)
def test_odd_sound_has_an_answer(workers: Plane, data: bytes) -> None:
    assert ask(workers, body(data))[1]["language"] == "en"
    assert ask(workers, body(data, response_format="vtt", language=None))[1]["segments"] is not None


def test_client_that_leaves_frees_the_engine(served: Stack) -> None:
    worker = served.workers[0]
    asked = body(wav(np.tile(heard(3, 10), 11)), response_format="json")
    with plane(served.environment()) as leaving, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(leaving.call, "backend.generate", asked)
        until("windows in the engine", lambda: worker.busy() > 1)
        leaving.process.kill()
        with pytest.raises(ValueError):  # no answer
            answer.result(30)
    until("an idle engine", lambda: worker.busy() == 0)
    with plane(served.environment()) as workers:
        assert ask(workers, body(wav(heard(1, 2.0))))[1]["done"]


def test_long_sound_does_not_keep_others_waiting(served: Stack) -> None:
    asked = body(wav(np.tile(heard(3, 10), 11)))
    with (
        plane(served.environment()) as one,
        plane(served.environment()) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        long = pool.submit(ask, one, asked)
        until("windows in the engine", lambda: served.workers[0].busy() > 1)
        ask(other, body(wav(heard(1, 2.0)), max_completion_tokens=2))
        assert not long.done()
        assert long.result(60)[1]["duration"] == 110


def test_memory_stays_bounded(served: Stack, workers: Plane) -> None:
    process = psutil.Process(served.workers[0].pid)
    ask(workers, body(wav(heard(1, 110)), max_completion_tokens=1))
    before = process.memory_info().rss
    for seed in range(4):
        ask(workers, body(wav(heard(seed, 110)), max_completion_tokens=1))
    assert process.memory_info().rss - before < 64 << 20
