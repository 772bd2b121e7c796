"""Tests what we rely on in vLLM's processing of audio, with a tiny model's processor and no weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from tiny_models.audio_input import RATE, SECONDS, make_tiny_audio_input_model
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerProcessingInfo
from vllm.multimodal.audio import AudioResampler
from vllm.renderers import ChatParams, renderer_from_config

from dynamo_vllm.engine.patches.patch import installed
from dynamo_vllm.engine.vllm.parts import audio as vllm_audio
from dynamo_vllm.engine.vllm.parts import media as vllm_media
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Media
from dynamo_vllm.roles.media import with_placeholders


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns the renderer of Qwen2-Audio, which makes 25 tokens of a second of audio."""
    model = make_tiny_audio_input_model(tmp_path_factory.mktemp("models") / "made")
    args = AsyncEngineArgs(
        model=str(model),
        max_model_len=2048,
        dtype="float32",
        enforce_eager=True,
        limit_mm_per_prompt={"audio": 2},
    )
    made = renderer_from_config(args.create_engine_config())
    yield made
    made.shutdown()


def sound(seconds: float, rate: int = RATE) -> Media:
    return Media("audio", (np.ones(int(seconds * rate), np.float32) / 2, rate), f"{seconds} s at {rate}")


async def marked(renderer: Any, count: int = 1) -> list[int]:
    part = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/never-asked"}}
    messages = with_placeholders([{"role": "user", "content": [part] * count}])
    _, text = await renderer.render_messages_async(messages, ChatParams())
    tokens = await renderer.tokenize_prompt_async(text, renderer.default_chat_tok_params)
    return list(tokens["prompt_token_ids"])


async def test_marks_become_as_many_tokens_as_the_sounds_last(renderer: Any) -> None:
    assert vllm_media.limits(renderer) == {"audio": 2}
    ids = await marked(renderer, 2)
    seen = await vllm_media.VllmMedia(renderer).process(ids, [sound(1), sound(0.5)])
    assert [place.length for place in seen.inner["mm_placeholders"]["audio"]] == [25, 12]
    assert len(seen.tokens) == len(ids) - 2 + 25 + 12


async def test_the_longest_sound_that_a_window_holds(renderer: Any) -> None:
    ids = await marked(renderer)
    seen = await vllm_media.VllmMedia(renderer).process(ids, [sound(SECONDS)])
    assert seen.inner["mm_kwargs"]["audio"][0]["input_features"].data.shape[-1] == 3000
    with pytest.raises(InvalidRequest, match=r"lasts 30\.1 s; this model accepts up to 30 s"):
        await vllm_media.VllmMedia(renderer).process(ids, [sound(SECONDS + 0.1)])


async def test_vllm_does_not_refuse_audio_that_is_too_long(renderer: Any) -> None:
    """vLLM 0.30 makes features that crash the engine, 0.31 truncates the audio silently. We refuse both."""
    given = {"prompt_token_ids": await marked(renderer), "multi_modal_data": {"audio": [sound(31).data]}}
    (made,) = await renderer.render_cmpl_async([given])
    length = made["mm_kwargs"]["audio"][0]["input_features"].data.shape[-1]
    assert (length == 3000) is (Version(installed("vllm") or "") >= Version("0.31"))


def test_subclasses_accept_longer_audio() -> None:
    info = object.__new__(Qwen2_5OmniThinkerProcessingInfo)
    assert vllm_audio.longest_seconds(info) is None


async def test_a_sound_too_short_for_one_token_is_refused(renderer: Any) -> None:
    with pytest.raises(InvalidRequest, match="refuses the audio: .* too short"):
        await vllm_media.VllmMedia(renderer).process(await marked(renderer), [sound(0.01)])


async def test_another_rate_is_changed_or_refused_with_the_fix(renderer: Any) -> None:
    ids, other = await marked(renderer), [sound(1, 44_100)]
    if find_spec("torchaudio") is not None:
        assert len((await vllm_media.VllmMedia(renderer).process(ids, other)).tokens) == len(ids) + 24
        return
    with pytest.raises(InvalidRequest, match="44100 Hz; this worker accepts only 16000 .*install torchaudio"):
        await vllm_media.VllmMedia(renderer).process(ids, other)


async def test_a_rate_for_which_a_resampler_is_there(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of vLLM's methods are those of modules, except for one."""
    assert AudioResampler._METHODS == ("pyav", "scipy", "soxr", "torchaudio")
    monkeypatch.setattr("dynamo_vllm.engine.vllm.parts.audio.find_spec", lambda name: name == "torchaudio")
    vllm_audio.refuse(renderer.mm_processor.info, [sound(1, 8000).data])
