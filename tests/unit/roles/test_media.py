"""Requests with media, up to the job an engine gets: what is taken, how it is named, what is refused."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from dynamo_vllm import wire
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.parts import FakeRenderer
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.errors import InvalidRequest, MediaRefused, TooLong
from dynamo_vllm.job import Job, Output
from dynamo_vllm.media.cache import MediaCache
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.loader import Loader, make_loader
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.roles.media import MediaReader, with_placeholders
from dynamo_vllm.roles.text import AggregatedText
from dynamo_vllm.serving.request.cancel import InFlight
from dynamo_vllm.serving.request.service import Service
from harness import media
from harness.fakes import FakeContext, FakeSender, request

IMAGE_TOKENS = 3
"""Of the fake engine."""


def picture(level: int, format: str = "PNG") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), (level, 0, 0)).save(buffer, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    """One for all: no two of these tests run at a time, and making one takes a tenth of a second."""
    made = make_loader(threads=1, reach=Reach((), (ipaddress.ip_network("127.0.0.0/8"),)))
    yield made
    asyncio.run(made.aclose())


async def make_role(loader: Loader | None, **takes: int) -> Aggregated:
    engine = FakeEngine(FakeSpec(media=takes), lambda figures: None)
    facts = engine.facts
    return Aggregated(facts, None, MediaReader(facts, loader, engine.parts.media))


def asked(*urls: str, names: list[str | None] | None = None, **more: Any) -> dict[str, Any]:
    """As the frontend sends it."""
    raw = {**request(), "multi_modal_data": {"image_url": [{"Url": url} for url in urls]}, **more}
    return raw if names is None else {**raw, "extra_args": {"mm_hashes": names, "messages": []}}


async def job_for(role: Aggregated, raw: dict[str, Any]) -> Job:
    return await role.prepare(role.parse(raw), "j")


def names(job: Job) -> list[str]:
    assert job.media is not None
    return [medium.name for medium in job.media.media]


async def names_for(role: Aggregated, *urls: str, **more: Any) -> list[str]:
    return names(await job_for(role, asked(*urls, **more)))


async def test_job_has_room_for_its_media_and_the_media(loader: Loader) -> None:
    job = await job_for(await make_role(loader, image=2), asked(picture(1), picture(2)))
    assert job.media is not None
    assert list(job.prompt) == list(job.media.tokens)
    assert list(job.prompt[2 * IMAGE_TOKENS :]) == list(job.media.plain) == [5, 6, 7]
    assert [medium.data.getpixel((0, 0)) for medium in job.media.media] == [(1, 0, 0), (2, 0, 0)]


@pytest.mark.parametrize("is_moved", [False, True])
async def test_usage_counts_the_whole_prompt_and_a_moved_request_goes_on_behind_its_media(
    loader: Loader, is_moved: bool
) -> None:
    """What was marked is the prompt with its media; the ids that come back are without."""
    role = await make_role(loader, image=2)
    raw = asked(picture(1), stop_conditions={"max_tokens": 6, "min_tokens": 5})
    if is_moved:
        raw |= {"token_ids": [5, 6, 7, 20, 21], "migration_link": wire.prompt_mark(3 + IMAGE_TOKENS)}
    parsed = role.parse(raw)
    job = await role.prepare(parsed, "j")
    assert list(job.prompt[IMAGE_TOKENS:]) == raw["token_ids"]
    assert job.sampling.min_tokens == (3 if is_moved else 5)
    chunk = role.encoder(parsed, job).encode(Output([9], finish="stop", finished=True))
    assert chunk["completion_usage"]["prompt_tokens"] == 3 + IMAGE_TOKENS
    assert chunk["worker_trace_link"] == wire.prompt_mark(3 + IMAGE_TOKENS)


async def test_name_is_of_the_content_and_of_the_salt(loader: Loader) -> None:
    role = await make_role(loader, image=4)
    one, same, other = await names_for(role, picture(1), picture(1), picture(2))
    assert one == same != other
    assert await names_for(role, picture(1).replace("image/png", "image/x")) == [one]
    salt = {"cache_salt": "mine"}
    salted, again = [await names_for(role, picture(1), routing=salt) for _ in range(2)]
    assert salted == again != [one]


async def test_names_of_the_frontend_stand_before_ours_and_odd_ones_are_left_out(loader: Loader) -> None:
    role = await make_role(loader, image=2)
    plain = await names_for(role, picture(1), picture(2))
    routed = await names_for(role, picture(1), picture(2), names=["ab" * 8, "cd" * 8])
    assert routed == [f"{'ab' * 8}-{plain[0]}", f"{'cd' * 8}-{plain[1]}"]
    odd: list[list[str | None]] = [
        ["ab" * 8],
        ["ab" * 8, None],
        ["ab" * 8, "../x"],
        [],
        ["a-b" * 5 + "c"] * 2,
    ]
    for wrong in odd:
        assert await names_for(role, picture(1), picture(2), names=wrong) == plain


async def test_names_are_those_of_pictures_only(loader: Loader) -> None:
    """The frontend has none for video and sound."""
    role = await make_role(loader, image=1, audio=1)
    raw = asked(picture(1), names=["ab" * 8])
    raw["multi_modal_data"] = {
        "audio_url": [{"Url": media.data_url(media.sound())}],
        **raw["multi_modal_data"],
    }
    heard, seen = names(await job_for(role, raw))
    assert "-" not in heard and seen.startswith("ab" * 8 + "-")


NAMELESS = {"multi_modal_data": {"image_url": [{"UuidOnly": "mine"}]}}


def decoded(shape: list[int], size: int, key: str = "image_url", **more: Any) -> dict[str, Any]:
    """As the frontend describes what it decoded."""
    memory = {"addr": 1, "size": size, "mem_type": more.pop("mem_type", "Dram"), "device_id": 0}
    told = {"nixl_metadata": "b64:", "nixl_descriptor": memory, "shape": shape, "dtype": "UINT8", **more}
    return {"multi_modal_data": {key: [{"Decoded": told}]}}


NO_PICTURE = "is not an image that this worker can read"
UNKNOWN = {"multi_modal_data": {"smell_url": [{"Url": "data:,"}]}}
SETTINGS = {"mm_processor_kwargs": {"min_pixels": 10**12}}
READING = {"media_io_kwargs": {"video": {"num_frames": 10**6}}}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (asked(*[picture(1)] * 3), "messages: 3 images in one request; this worker takes 2"),
        (asked(picture(1)) | NAMELESS, "image_url without a URL"),
        (asked(picture(1)) | decoded([4, 4, 3], 47), NO_PICTURE),
        (asked(picture(1)) | decoded([4, 4, 3], 49), NO_PICTURE),
        (asked(picture(1)) | decoded([4, 12], 48), NO_PICTURE),
        (asked(picture(1)) | decoded([2, 3, 8], 48), NO_PICTURE),
        (asked(picture(1)) | decoded([-4, -4, 3], 48), NO_PICTURE),
        (asked(picture(1)) | decoded([0, 4, 3], 0), NO_PICTURE),
        (asked(picture(1)) | decoded([4, 4, 3], 48, dtype="FLOAT32"), NO_PICTURE),
        (asked(picture(1)) | decoded([4, 4, 3], 48, mem_type="Vram"), NO_PICTURE),
        (asked(picture(1)) | decoded([4, 4, 3], 48, key="video_url"), "video of shape"),
        (asked(picture(1)) | UNKNOWN, "smell_url is an unknown kind of media"),
        (asked(picture(1)) | SETTINGS, "mm_processor_kwargs: clients may not set this"),
        (asked(picture(1)) | READING, "media_io_kwargs: clients may not set this"),
        (asked(picture(1), prompt_embeds="x"), "--enable-prompt-embeds"),
        ({**request(), "multi_modal_data": {"video_url": [{"Url": "x"}]}}, "this model takes no videos"),
    ],
)
async def test_refused_before_anything_is_fetched(loader: Loader, raw: dict[str, Any], said: str) -> None:
    loader.cache = MediaCache(1 << 20)
    with pytest.raises(InvalidRequest, match=said):
        await job_for(await make_role(loader, image=2), raw)
    assert len(loader.cache) == 0


async def test_refused_when_it_is_looked_at(loader: Loader) -> None:
    refusals: list[tuple[Loader | None, dict[str, int], dict[str, Any], type[Exception], str]] = [
        (loader, {"image": 2}, decoded([4, 4, 3], 48), MediaRefused, "started without --frontend-decoding"),
        (loader, {"image": 2}, {"token_ids": [5] * 4094}, TooLong, "prompt has 4097 tokens"),
        (loader, {"image": 2}, asked(picture(1), picture(1)[:60]), MediaRefused, "image 2 of 2"),
        (loader, {}, {}, InvalidRequest, "this model takes text only"),
        (None, {"image": 2}, {}, InvalidRequest, "started without --enable-multimodal"),
    ]
    for loads, takes, more, error, match in refusals:
        with pytest.raises(error, match=match):
            await job_for(await make_role(loads, **takes), asked(picture(1)) | more)


async def test_empty_prompt_of_a_model_that_hears_tells_of_input_audio(loader: Loader) -> None:
    """The frontend drops the part, and the chat template then leaves nothing."""
    beside = {"multi_modal_data": {"audio_url": [{"Url": "data:audio/wav;base64,AAAA"}]}}
    for raw in ({**request(), "token_ids": []}, {**request(), "token_ids": [], **beside}):
        with pytest.raises(InvalidRequest, match="the frontend drops input_audio; send audio_url"):
            await job_for(await make_role(loader, audio=1), raw)
    with pytest.raises(InvalidRequest, match="the prompt is empty$"):
        await job_for(await make_role(loader, image=1), {**request(), "token_ids": []})


async def test_client_that_leaves_ends_the_fetch(loader: Loader) -> None:
    asked_for, closed = asyncio.Event(), asyncio.Event()

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked_for.set()
        assert await reader.read() == b""
        closed.set()
        writer.close()

    server = await asyncio.start_server(never_answers, "127.0.0.1", 0)
    async with server:
        engine = FakeEngine(FakeSpec(media={"image": 1}), lambda figures: None)
        facts = engine.facts
        in_flight = InFlight(engine)
        role = Aggregated(facts, None, MediaReader(facts, loader, engine.parts.media))
        service = Service(role, engine, in_flight, lambda dead: None)
        context, sender = FakeContext(), FakeSender()
        raw = asked(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png")

        async def run() -> None:
            async for _ in service.generate(raw, context, sender):
                raise AssertionError("push egress yields nothing")

        running = asyncio.create_task(run())
        await asyncio.wait_for(asked_for.wait(), 30)
        assert len(in_flight) == 1
        context.stop()
        await asyncio.wait_for(running, 30)
        await asyncio.wait_for(closed.wait(), 30)
    assert (sender.chunks, len(in_flight), engine.running) == ([], 0, {})


# --- text mode -------------------------------------------------------------------------------------------


async def text_job(loader: Loader | None, parts: list[Any], **takes: int) -> Job:
    engine = FakeEngine(FakeSpec(media=takes), lambda figures: None)
    facts = dataclasses.replace(engine.facts, context_length=100_000)
    role = AggregatedText(
        facts, FakeRenderer(1000), ("tiny",), None, MediaReader(facts, loader, engine.parts.media)
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]
    return await role.prepare(role.parse({"messages": messages}), "j")


def image(url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, "uuid": "mine"}


async def test_messages_are_rendered_without_their_urls(loader: Loader) -> None:
    text = {"type": "text", "text": "ba"}
    job = await text_job(loader, [image(picture(1)), text, image(picture(2))], image=2)
    assert len(names(job)) == 2 and len(set(names(job))) == 2
    marked = with_placeholders([{"role": "user", "content": [image(picture(1)), text]}])
    mark = {"type": "image_url", "image_url": None, "uuid": "mark"}
    assert marked == [{"role": "user", "content": [mark, text]}]


async def test_sound_in_a_message(loader: Loader) -> None:
    sound = {"data": base64.b64encode(media.sound()).decode(), "format": "wav"}
    job = await text_job(loader, [{"type": "input_audio", "input_audio": sound}], audio=1)
    assert job.media is not None
    samples, rate = job.media.media[0].data
    assert (len(samples), rate) == (4000, 8000)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([image(picture(1))] * 3, "3 images in one request"),
        ([image(None)], "image_url without a URL"),
        ([{"type": "image_url", "image_url": 3}], "image_url without a URL"),
        ([{"type": "image_embeds", "image_embeds": "x"}], "content part 'image_embeds' is unknown"),
        (["words"], "content part None is unknown"),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "a/b;,"}}], "input_audio needs"),
        ([{"type": "video_url", "video_url": {"url": "data:,"}}], "this model takes no videos"),
    ],
)
async def test_refused_message(loader: Loader, parts: list[Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await text_job(loader, parts, image=2)
