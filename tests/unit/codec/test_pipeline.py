"""Requests for pictures: what is read from which place, what is refused by name, what goes back."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import pytest

from dynamo_vllm.codec.openai_media import ImagesEncoder, MediaChatEncoder
from dynamo_vllm.codec.pipeline import Bounds
from dynamo_vllm.engine.fake.spec import FakeSpec, facts_of
from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import Job, MediaFile, Output, PipelineLimits, PipelineSpec
from dynamo_vllm.roles.omni import MediaPipeline

FACTS = dataclasses.replace(facts_of(FakeSpec()), pipeline=PipelineLimits(step=8, max_prompt_tokens=5))
BOUNDS = Bounds(max_side=1024, max_steps=50, max_images=4, max_megapixels=2.1, max_video_megapixels=20)
PNG = MediaFile("image", "image/png", b"picture")


@pytest.fixture
def role() -> MediaPipeline:
    return MediaPipeline(FACTS, ["img"], BOUNDS, lambda text: len(text.split()))


async def drawn(role: MediaPipeline, body: dict[str, Any]) -> PipelineSpec:
    job = await role.prepare(role.parse(body), "j")
    assert job.pipeline is not None
    return job.pipeline


async def test_every_field_of_an_image_body_is_read(role: MediaPipeline) -> None:
    settings = {"seed": 7, "num_inference_steps": 3, "guidance_scale": 2.5, "negative_prompt": "dog"}
    body = {"prompt": "a cat", "n": 2, "size": "64x128", "output_format": "jpeg", "nvext": settings}
    read = {"seed": 7, "steps": 3, "guidance": 2.5, "negative_prompt": "dog", "format": "jpeg"}
    assert await drawn(role, body) == PipelineSpec(prompt="a cat", n=2, width=64, height=128, **read)  # type: ignore[arg-type]


async def test_settings_beside_the_body_are_read_and_nvext_wins(role: MediaPipeline) -> None:
    beside = {"media_passthrough": {"seed": 1, "num_inference_steps": 9}}
    spec = await drawn(role, {"prompt": "a", "extra_args": beside, "nvext": {"seed": 2}})
    assert (spec.seed, spec.steps) == (2, 9)


async def test_chat_draws_the_last_message_of_the_user(role: MediaPipeline) -> None:
    said = [("user", "first"), ("assistant", "no"), ("user", [{"type": "text", "text": "a cat"}])]
    body = {"messages": [{"role": who, "content": content} for who, content in said], "seed": 3}
    settings = {"size": "64x64", "num_inference_steps": 2}
    spec = await drawn(role, {**body, "mm_processor_kwargs": settings})
    assert (spec.prompt, spec.seed, spec.width, spec.steps) == ("a cat", 3, 64, 2)


async def test_without_a_seed_every_picture_is_another(role: MediaPipeline) -> None:
    seeds = {(await drawn(role, {"prompt": "a"})).seed for _ in range(5)}
    assert len(seeds) > 1


def passed_through(**settings: Any) -> dict[str, Any]:
    return {"extra_args": {"media_passthrough": settings}}


async def test_what_cannot_be_drawn_is_refused_by_name(role: MediaPipeline) -> None:
    refusals: dict[str, list[dict[str, Any]]] = {
        "size": [{"size": size} for size in ("0x0", "60x60", "100000x100000", "64x4", "large", "64×64")],
        "n:": [{"n": 0}, {"n": 100}],
        "num_inference_steps": [
            {"nvext": {"num_inference_steps": 0}},
            passed_through(num_inference_steps=10**6),
        ],
        "seed": [{"nvext": {"seed": -1}}],
        "guidance_scale": [
            *({"nvext": {"guidance_scale": scale}} for scale in (-0.5, float("nan"))),
            passed_through(guidance_scale="x"),
        ],
        "response_format": [{"response_format": "gif"}],
        "output_format": [{"output_format": "tiff"}],
        "background": [{"background": "transparent"}],
        "input_reference": [{"input_reference": "http://x"}],
        "negative_prompt": [{"nvext": {"negative_prompt": "a b c d e f"}}],
        "prompt": [{"prompt": wrong} for wrong in (" ", 3, "one two three four five six", "x" * 40_000)],
        "n: 3 images of 1048576 pixels have 3.1 million": [{"size": "1024x1024", "n": 3}, {"n": 3}],
    }
    for named, changes in refusals.items():
        for change in changes:
            with pytest.raises((InvalidRequest, TooLong)) as refused:
                await drawn(role, {"prompt": "a cat", **change})
            assert named in str(refused.value)


async def test_steps_beyond_what_the_model_was_trained_with_are_refused() -> None:
    limits = PipelineLimits(step=8, max_steps=20)
    role = MediaPipeline(dataclasses.replace(FACTS, pipeline=limits), ["img"], BOUNDS, len)
    assert (await drawn(role, {"prompt": "a", "nvext": {"num_inference_steps": 20}})).steps == 20
    with pytest.raises(InvalidRequest, match="num_inference_steps: 21 is not between 1 and 20"):
        await drawn(role, {"prompt": "a", "nvext": {"num_inference_steps": 21}})


async def test_many_small_pictures_are_as_good_as_few_large_ones(role: MediaPipeline) -> None:
    assert (await drawn(role, {"prompt": "a", "size": "1024x1024", "n": 2})).n == 2
    assert (await drawn(role, {"prompt": "a", "size": "512x512", "n": 4})).n == 4


async def test_bad_chats_are_refused_by_name(role: MediaPipeline) -> None:
    good = {"role": "user", "content": "a"}
    for named, body in (
        ("messages", {"messages": []}),
        ("messages", {"messages": [{**good, "content": [{"type": "image_url"}]}]}),
        ("size", {"messages": [good], "mm_processor_kwargs": {"size": 5}}),
        ("n:", {"messages": [good], "n": 9}),
    ):
        with pytest.raises(InvalidRequest, match=named):
            await drawn(role, body)


async def test_the_health_check_is_a_request_this_role_takes(role: MediaPipeline) -> None:
    spec = await drawn(role, role.health_check())
    assert (spec.width, spec.steps, spec.seed) == (64, 1, 0)


# --- videos and sounds ----------------------------------------------------------------------------------


def maker(kind: str) -> MediaPipeline:
    limits = PipelineLimits(step=8, kind=kind, frames=16)
    return MediaPipeline(dataclasses.replace(FACTS, pipeline=limits), ["m"], BOUNDS, len)


@pytest.mark.parametrize(
    ("change", "frames", "fps"),
    [
        ({}, 16, None),
        ({"nvext": {"num_frames": 5, "fps": 8}}, 5, 8),
        ({"seconds": 2}, 48, None),
        ({"seconds": 2, "extra_args": {"media_passthrough": {"fps": 10}}}, 20, 10),
        ({"seconds": 2, "nvext": {"num_frames": 5}}, 5, None),
    ],
)
async def test_the_length_of_a_video(change: dict[str, Any], frames: int, fps: int | None) -> None:
    spec = await drawn(maker("video"), {"prompt": "a", "size": "64x64", **change})
    assert (spec.kind, spec.frames, spec.fps, spec.format) == ("video", frames, fps, "mp4")


async def test_what_cannot_be_made_is_refused_by_name() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 2}
    videos: list[tuple[str, dict[str, Any]]] = [
        ("num_frames", {"nvext": {"num_frames": 0}}),
        ("num_frames", {"nvext": {"num_frames": 10**6}}),
        ("num_frames: 30 frames", {"size": "1024x1024", "nvext": {"num_frames": 30}}),
        ("num_frames: 60 frames of 399360 pixels", {"nvext": {"num_frames": 60}}),
        ("fps", {"nvext": {"fps": 0}}),
        ("seconds", {"seconds": 0}),
        ("output_format", {"output_format": "webm"}),
        ("response_format", {"response_format": "b64"}),
        ("input_reference", {"input_reference": "x"}),
    ]
    sounds = [("response_format", "mp3"), ("speed", 2.0), ("ref_audio", "x"), ("input", " ")]
    for kind, body, named in (
        *(("video", {"prompt": "a", **change}, named) for named, change in videos),
        ("video", chat, "n: 2"),
        *(("audio", {"input": "a", field: value}, field) for field, value in sounds),
        ("audio", {"prompt": "a"}, "input"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await drawn(maker(kind), body)
        assert named in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "body", "offered", "object"),
    [
        ("video", {"prompt": "a", "response_format": "url"}, ("chat", "videos"), "video"),
        ("audio", {"input": "a", "data_source": "url"}, ("chat", "audios"), "audio.speech"),
    ],
)
async def test_videos_and_sounds_go_back_as_files(
    kind: str, body: dict[str, Any], offered: tuple[str, ...], object: str
) -> None:
    role = maker(kind)
    assert role.card.endpoint_types == offered
    assert (await drawn(role, role.health_check())).steps == 1
    file = MediaFile(kind, f"{kind}/x", b"f")
    output = Output((), finish="stop", finished=True, media=[file])
    format = {"video": "mp4", "audio": "wav"}[kind]
    for asked, key in ((body, "url"), (dict.fromkeys(list(body)[:1], "a"), "b64_json")):
        request = role.parse(asked)
        chunk = role.encoder(request, await role.prepare(request, "j")).encode(output)
        assert (chunk["object"], chunk["id"], chunk["model"]) == (object, f"{kind}-j", "m")
        assert chunk["data"][0]["output_format"] == format
        assert key in chunk["data"][0]


# --- what goes back -------------------------------------------------------------------------------------


def test_images_go_back_as_base64_or_as_data_urls() -> None:
    output = Output((), finish="stop", finished=True, media=[PNG, PNG])
    plain = ImagesEncoder(wants_url=False, size="64x64", format="png").encode(output)
    code = base64.b64encode(b"picture").decode()
    assert plain["data"] == [{"b64_json": code}] * 2
    assert (plain["size"], plain["output_format"]) == ("64x64", "png")
    linked = ImagesEncoder(wants_url=True, size=None, format="png").encode(output)
    assert linked["data"][0] == {"url": f"data:image/png;base64,{code}"}
    assert "size" not in linked


def test_the_text_of_an_earlier_stage_is_the_revised_prompt() -> None:
    encoder = ImagesEncoder(wants_url=False, size=None, format="png")
    assert encoder.encode(Output([1], text="a cat in the sun"))["data"] == []
    (made,) = encoder.encode(Output((), finish="stop", finished=True, media=[PNG]))["data"]
    assert made["revised_prompt"] == "a cat in the sun"


def test_chat_gets_text_and_media_as_parts_of_one_content() -> None:
    encoder = MediaChatEncoder("j", "img", 3)
    first = encoder.encode(Output([1, 2], text="a cat"))["choices"][0]
    assert first == {"index": 0, "delta": {"content": "", "role": "assistant"}, "finish_reason": None}
    sound = MediaFile("audio", "audio/wav", b"s")
    last = encoder.encode(Output((), finish="stop", finished=True, media=[PNG, sound]))
    (choice,) = last["choices"]
    kinds = [part["type"] for part in choice["delta"]["content"]]
    assert kinds == ["text", "image_url", "audio_url"]
    assert choice["delta"]["content"][0]["text"] == "a cat"
    assert choice["delta"]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert choice["finish_reason"] == "stop"
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


async def test_each_body_gets_its_own_kind_of_chunk(role: MediaPipeline) -> None:
    chat = role.parse({"messages": [{"role": "user", "content": "a"}], "model": "other"})
    image = role.parse({"prompt": "a", "size": "64x64", "response_format": "url"})
    job: Job = await role.prepare(image, "j")
    output = Output((), finish="stop", finished=True, media=[PNG])
    assert role.encoder(chat, job).encode(output)["model"] == "other"
    assert "url" in role.encoder(image, job).encode(output)["data"][0]
