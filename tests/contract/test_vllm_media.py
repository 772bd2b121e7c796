"""Tests what we rely on in vLLM's processing of media, with a tiny model's processor and no weights."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_models.vision import make_tiny_vision_model
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.renderers import ChatParams, renderer_from_config
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.engine import EngineCoreOutput, FinishReason

from dynamo_vllm.engine.encoder_cache.folder import Unusable
from dynamo_vllm.engine.vllm.parts import media as vllm_media
from dynamo_vllm.engine.vllm.parts.encoded import Encoded
from dynamo_vllm.errors import EngineRequestFailed, InvalidRequest
from dynamo_vllm.job import Media
from dynamo_vllm.roles.media import with_placeholders

NAMES = ["0123456789abcdef-" + "a" * 64, "b" * 64]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the renderer of Qwen2-VL, which makes four tokens of an image of 56 by 56 pixels."""
    model = make_tiny_vision_model(tmp_path_factory.mktemp("models") / "made", "qwen2-vl")
    args = AsyncEngineArgs(
        model=str(model),
        max_model_len=512,
        dtype="float32",
        enforce_eager=True,
        limit_mm_per_prompt={"image": 2},
    )
    made = renderer_from_config(args.create_engine_config())
    yield made
    made.shutdown()


def pictures(*names: str) -> list[Media]:
    return [Media("image", Image.new("RGB", (56, 56)), name) for name in names]


async def marked(renderer: Any, count: int) -> list[int]:
    """Returns the tokens of a chat with this many placeholders, as text mode renders it."""
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/never-asked"}}
    messages = with_placeholders([{"role": "user", "content": [part] * count}])
    _, text = await renderer.render_messages_async(messages, ChatParams())
    tokens = await renderer.tokenize_prompt_async(text, renderer.default_chat_tok_params)
    return list(tokens["prompt_token_ids"])


async def test_marks_become_tokens_and_names_stay(renderer: Any) -> None:
    ids = await marked(renderer, 2)
    (mark,) = {token for token in ids if ids.count(token) == 2} & {6}
    seen = await vllm_media.VllmMedia(renderer).process(ids, pictures(*NAMES))
    assert seen.tokens.count(mark) == 8 and len(seen.tokens) == len(ids) + 6
    assert seen.inner["type"] == "multimodal"
    assert seen.inner["mm_hashes"] == {"image": NAMES}
    assert list(seen.plain) == ids


async def test_blocks_are_keyed_by_name_and_offset(renderer: Any) -> None:
    """`engine.patches.kv_events` looks for such pairs."""
    seen = await vllm_media.VllmMedia(renderer).process(await marked(renderer, 1), pictures(NAMES[0]))
    (place,) = seen.inner["mm_placeholders"]["image"]
    feature = SimpleNamespace(identifier=NAMES[0], mm_position=place)
    request: Any = SimpleNamespace(
        mm_features=[feature], lora_request=None, cache_salt=None, prompt_embeds=None
    )
    keys, _ = generate_block_hash_extra_keys(request, 0, 32, 0)
    # Since 0.31 a mark stands before each, which events leave out.
    assert [key[-2:] for key in keys or ()] == [(NAMES[0], place.offset)]


async def test_limits_are_those_of_model_and_user(renderer: Any) -> None:
    found = vllm_media.limits(renderer)
    assert found["image"] == 2 and found["video"] > 2 and "audio" not in found
    chooser = vllm_media.VllmMedia(renderer).frame_chooser()
    assert chooser is not None and chooser[0] == "qwen2_vl"


@pytest.mark.parametrize(
    ("marks", "media", "said"),
    [
        (1, pictures("one", "two"), "the prompt lacks a placeholder for every image"),
        (1, [Media("image", Image.new("RGB", (900, 2)), "strip")], "aspect ratio must be smaller than 200"),
        (2, pictures("one", "two", "three"), "At most 2 image"),
    ],
)
async def test_what_the_model_cannot_take_is_the_clients_fault(
    renderer: Any, marks: int, media: list[Media], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        await vllm_media.VllmMedia(renderer).process(await marked(renderer, marks), media)
    assert len(str(caught.value)) < 300, "vLLM's own text is a dump of the data"


async def test_encodings_of_different_widths_are_done_without(renderer: Any) -> None:
    grid = {"image_grid_thw": [1, 4, 4]}
    media = [Media("image", Encoded(torch.zeros(4, n), grid), str(n)) for n in (8, 16)]
    with pytest.raises(Unusable):
        await vllm_media.VllmMedia(renderer).process(await marked(renderer, 2), media)


@pytest.mark.parametrize(
    "reason", [MemoryError("x"), RuntimeError("cannot schedule new futures"), OSError("x")]
)
def test_what_fails_in_the_worker_is_not_the_clients_fault(reason: Exception) -> None:
    wrapped = ValueError("Failed to apply Qwen2VLProcessor on data=…")
    wrapped.__cause__ = reason
    for exc in (wrapped, reason):
        assert isinstance(vllm_media.refusal(exc, pictures("one")), EngineRequestFailed)


async def test_media_seen_twice_come_without_content(renderer: Any) -> None:
    """vLLM assumes that the engine core has them; `VllmEngine.stream` sends them again if it has not."""
    ids = await marked(renderer, 1)
    first = await vllm_media.VllmMedia(renderer).process(ids, pictures("again"))
    second = await vllm_media.VllmMedia(renderer).process(ids, pictures("again"))
    assert first.inner["mm_kwargs"]["image"][0] is not None
    assert second.inner["mm_kwargs"]["image"][0] is None
    pixels = first.inner["mm_kwargs"]["image"][0]["pixel_values"].data
    assert pixels.nbytes < first.size < pixels.nbytes + 100 and second.size == 0
    renderer.mm_processor_cache.invalidate("again")
    third = await vllm_media.VllmMedia(renderer).process(ids, pictures("again"))
    assert third.inner["mm_kwargs"]["image"][0] is not None


def test_core_tells_of_media_it_has_not() -> None:
    ended = EngineCoreOutput(request_id="r", new_token_ids=[], finish_reason=FinishReason.ERROR)
    assert ended.mm_cache_miss_hashes is None
    assert "mm_hash" in inspect.signature(BaseMultiModalProcessorCache.invalidate).parameters
    source = inspect.getsource(__import__("vllm.v1.engine.async_llm", fromlist=["x"]))
    assert source.index("process_outputs(\n") < source.index("mm_processor_cache.invalidate(mm_hash)")
