"""The transcription role: sounds become jobs, and refusals name the field."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.errors import MediaTooLarge, RequestError
from dynamo_vllm.media.base import MediaLimits
from dynamo_vllm.media.loader import Loader, make_loader
from dynamo_vllm.roles.transcription import Transcription
from dynamo_vllm.roles.trials import TrialInputs
from harness.fakes import outputs
from harness.media import picture, sound

ENGINE = FakeEngine(FakeSpec(transcription=True, window_seconds=3, context_length=64), lambda _: None)
SECONDS = 20


@pytest.fixture
async def loader() -> AsyncIterator[Loader]:
    made = make_loader(MediaLimits(max_seconds=SECONDS, per_request={"audio": 1}), cache_bytes=0)
    yield made
    await made.aclose()


@pytest.fixture
def role(loader: Loader) -> Transcription:
    speech = ENGINE.parts.speech
    assert speech is not None
    return Transcription(ENGINE.facts, speech, ["tiny"], loader)


def body(data: bytes, **more: Any) -> dict[str, Any]:
    return {"file": base64.b64encode(data).decode(), **more}


async def answer(role: Transcription, asked: dict[str, Any]) -> list[dict[str, Any]]:
    request = role.parse(asked)
    job = await role.prepare(request, "job")
    encoder = role.encoder(request, job)
    return [encoder.encode(output) for output in await outputs(ENGINE, job)]


async def test_sound_becomes_text(role: Transcription) -> None:
    chunks = await answer(role, body(sound(2.5), language="EN"))
    text = "".join(chunk["text"] for chunk in chunks)
    last = chunks[-1]
    assert len(text.split()) == 3
    assert text == " ".join(text.split())
    assert (last["done"], last["language"], last["duration"], last["segments"]) == (True, "en", 2.5, None)
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens"] == 4 + 125
    assert last["usage"]["seconds"] == 3


async def test_long_sound_has_windows_and_its_segments_go_on(role: Transcription) -> None:
    chunks = await answer(role, body(sound(11), response_format="verbose_json"))
    text, segments = "".join(chunk["text"] for chunk in chunks), chunks[-1]["segments"]
    assert chunks[-1]["language"] == "de"
    assert text == " ".join(segment["text"].strip() for segment in segments)
    assert [segment["id"] for segment in segments] == [*range(len(segments))]
    assert len(segments) >= 4
    times = [time for segment in segments for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(11, abs=0.01)


async def test_file_is_dropped_when_it_is_decoded_and_the_sound_at_the_end(role: Transcription) -> None:
    request = role.parse(body(sound()))
    job = await role.prepare(request, "job")
    assert request.file == ""
    assert job.speech is not None and job.speech.samples is not None
    await outputs(ENGINE, job)
    assert job.speech.samples is None


async def test_hint_is_bounded_and_leaves_room(role: Transcription) -> None:
    job = await role.prepare(role.parse(body(sound(), prompt="word " * 1000)), "job")
    assert len(job.prompt) == 31 + 4
    assert job.sampling.max_tokens == 64 - len(job.prompt)
    fewer = await role.prepare(role.parse(body(sound(), max_completion_tokens=3)), "job")
    assert fewer.sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("data", "more", "status", "field"),
    [
        (b"", {}, 400, "file"),
        (b"hello", {}, 415, "file"),
        (picture(), {}, 415, "file"),
        (sound()[:-7], {}, 400, "file"),
        (sound()[:20], {}, 400, "file"),
        (sound(SECONDS + 1), {}, 413, "file"),
        (b"fLaC" + bytes(100), {}, 400, "file"),
        (sound(), {"language": "xx"}, 400, "language"),
        (sound(), {"to_language": "de", "task": "translate"}, 400, "to_language"),
        (sound(), {"to_language": "en"}, 400, "to_language"),
    ],
)
async def test_refusals_name_the_field(
    role: Transcription, data: bytes, more: dict[str, Any], status: int, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await role.prepare(role.parse(body(data, **more)), "job")
    assert caught.value.status == status
    assert str(caught.value).startswith(f"{field}: ")
    assert "1 of 1" not in str(caught.value)
    with pytest.raises(RequestError, match=r"^file: is not valid base64$"):
        await role.prepare(role.parse({"file": "%%%%"}), "job")


async def test_samples_of_speech_have_a_limit() -> None:
    loader = make_loader(MediaLimits(max_speech_bytes=4000, per_request={"audio": 1}))
    speech = ENGINE.parts.speech
    assert speech is not None
    role = Transcription(ENGINE.facts, speech, ["tiny"], loader)
    try:
        await role.prepare(role.parse(body(sound(0.125, channels=2))), "job")
        with pytest.raises(MediaTooLarge, match="more than 1000 samples"):
            await role.prepare(role.parse(body(sound(0.126, channels=2))), "job")
    finally:
        await loader.aclose()


async def test_own_requests_need_no_file(role: Transcription) -> None:
    trials = role.trials(TrialInputs("salt"))
    for asked in (role.health_check(), trials.plain.request, *(trial.request for trial in trials.short)):
        assert (await answer(role, dict(asked)))[-1]["done"]


def test_adapters_have_their_own_names(role: Transcription) -> None:
    assert role.adapter(role.parse({"model": "tiny"})) is None
    assert not role.card.is_listed
