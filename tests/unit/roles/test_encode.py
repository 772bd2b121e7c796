"""Encode workers and those who ask them, without an engine: what is asked, what is believed, who encodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm import wire
from dynamo_vllm.engine.encoder_cache.folder import ABANDONED_SECONDS, Folder, Unusable, own_name
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.parts import FakeEncoded, FakeMedia
from dynamo_vllm.engine.fake.spec import FakeSpec, facts_of
from dynamo_vllm.errors import InvalidRequest, MediaTooLarge, MediaTypeUnknown, RequestError, TooLong
from dynamo_vllm.job import Job, MediaPrompt, Output
from dynamo_vllm.media.base import MediaItem, MediaRef
from dynamo_vllm.media.loader import Loader, make_loader
from dynamo_vllm.roles import encode
from dynamo_vllm.roles.encoded import EncodedReader, NoEncoder
from dynamo_vllm.roles.media import MediaReader
from dynamo_vllm.serving.encoding.encode_workers import EncodeWorkers
from dynamo_vllm.serving.request.cancel import InFlight
from dynamo_vllm.serving.request.service import Service
from harness.fakes import FakeContext, FakeSender
from unit.roles.test_media import picture

RED, DARK = MediaRef("image", picture(200)), MediaRef("image", picture(20))
A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    made = make_loader(threads=1)
    yield made
    asyncio.run(made.aclose())


def make_engine() -> FakeEngine:
    return FakeEngine(FakeSpec(media={"image": 3, "video": 1}), lambda figures: None)


@pytest.fixture
async def role(loader: Loader, tmp_path: Path) -> encode.Encode:
    engine = make_engine()
    reader = MediaReader(engine.facts, loader, engine.parts.media)
    return encode.Encode(engine.facts, reader, Folder(tmp_path, 10**6))


# --- the folder: names and room --------------------------------------------------------------------------


def put(folder: Folder, name: str, size: int, age: float = 0.0) -> Path:
    path = folder.path / f"{name}.safetensors"
    path.write_bytes(bytes(size))
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))
    return path


def held(folder: Folder) -> set[str]:
    return {path.name[0] for path in folder.path.glob("*.safetensors")}


def test_folder_keeps_to_its_bytes_and_forgets_the_longest_unused(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 250)
    for name, age in ((A, 30), (B, 20), (C, 10)):
        put(folder, name, 100, age)
    assert folder.has(A)  # used just now
    folder.evict()
    assert held(folder) == {"a", "c"}
    put(small := Folder(tmp_path, 50), B, 100, age=40)
    small.evict(keep=f"{B}.safetensors")
    assert held(small) == {"b"}, "what was just written stays even above the limit"


def test_leavings_of_a_killed_encoder_are_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 10**6)
    old, new, other = tmp_path / "x.1-0.part", tmp_path / "y.1-0.part", tmp_path / "notes.txt"
    for path in (old, new, other):
        path.write_bytes(b"half")
    past = old.stat().st_mtime - ABANDONED_SECONDS - 1
    for path in (old, other):
        os.utime(path, (past, past))
    folder.evict()
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)


def test_folder_is_nobody_elses(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "shared" / "of-a-model", 10)
    assert [path.stat().st_mode & 0o777 for path in (folder.path, folder.path.parent)] == [0o700, 0o700]


def test_only_our_names_become_files(tmp_path: Path) -> None:
    assert own_name(A) == own_name(f"{'0' * 16}-{A}") == A
    for name in ("../" + A, "canary", A + "\n", ""):
        assert own_name(name) is None
        assert not Folder(tmp_path, 10).has(name)


# --- the encoder's side ----------------------------------------------------------------------------------


async def job_for(role: encode.Encode, *refs: MediaRef, salt: str | None = None, tokens: int = 2) -> Job:
    return await role.prepare(role.parse(encode.request([1] * tokens, refs, salt)), "j")


async def names_of(role: encode.Encode, job: Job, *refs: MediaRef) -> list[str]:
    request = role.parse(encode.request([1, 2], refs, None))
    output = job.answer or Output([], finish="stop", finished=True)
    chunk = role.encoder(request, job).encode(output)
    return [found["name"] for found in chunk["disaggregated_params"]["encoded"]]


async def test_encoder_names_media_by_content_and_salt(role: encode.Encode) -> None:
    job = await job_for(role, RED, DARK, RED)
    red, dark, again = await names_of(role, job, RED, DARK, RED)
    assert red == again != dark
    (salted,) = await names_of(role, await job_for(role, RED, salt="s"), RED)
    assert salted != red


async def test_what_is_in_the_folder_is_not_encoded_again(role: encode.Encode, tmp_path: Path) -> None:
    job = await job_for(role, RED)
    assert job.answer is None and job.media is not None
    (name,) = await names_of(role, job, RED)
    put(Folder(tmp_path, 10**6), name, 10)
    again = await job_for(role, RED)
    assert again.answer is not None and await names_of(role, again, RED) == [name]
    assert (await job_for(role, RED, DARK)).answer is None


async def test_encoder_refuses_a_request_without_media_but_not_a_health_check(role: encode.Encode) -> None:
    with pytest.raises(InvalidRequest, match="needs media"):
        await job_for(role)
    assert (await role.prepare(role.parse(role.health_check()), "j")).media is None


HTML = MediaRef("image", "data:image/png;base64,PGh0bWw+")


@pytest.mark.parametrize(
    ("refs", "status", "message"),
    [
        ((RED, HTML), 415, "image 2 of 2: "),
        ((MediaRef("image", "http://127.0.0.1/a"),), 400, "image 1 of 1: the host is not found"),
        ((MediaRef("video", "ftp://a/b"),), 400, "video 1 of 1: "),
    ],
)
async def test_what_the_encoder_has_against_media_comes_back_as_it_was(
    refs: tuple[MediaRef, ...], status: int, message: str, loader: Loader, role: encode.Encode
) -> None:
    with pytest.raises(RequestError) as raised:
        await loader.load_all(refs)
    error = await refusal(role, *refs)
    assert (type(error), str(error)) == (type(raised.value), str(raised.value))
    assert error.status == status and str(error).startswith(message)


async def refusal(role: encode.Encode, *refs: MediaRef, tokens: int = 2) -> RequestError:
    """What those who ask hear."""
    job = await job_for(role, *refs, tokens=tokens)
    assert job.answer is not None
    request = role.parse(encode.request([1, 2], refs, None))
    told = role.encoder(request, job).encode(job.answer)["disaggregated_params"]
    answer = encode.parse_answer(told)
    assert isinstance(answer, encode.Refusal)
    return answer.error()


async def test_what_the_engine_has_against_media_comes_back_with_its_parameter(
    loader: Loader, tmp_path: Path
) -> None:
    class Choosy(FakeMedia):
        async def process(self, prompt: Any, media: Any) -> MediaPrompt:
            raise InvalidRequest("the model's processor refuses the image", parameter="messages")

    facts = facts_of(FakeSpec(media={"image": 3}))
    role = encode.Encode(facts, MediaReader(facts, loader, Choosy({"image"})), Folder(tmp_path, 10))
    assert str(await refusal(role, RED)) == "messages: the model's processor refuses the image"


async def test_encoder_tells_its_stages_and_a_health_check_hears_the_end_only(role: encode.Encode) -> None:
    engine = make_engine()
    service = Service(role, engine, InFlight(engine), lambda _: None)
    for asked, stages in (
        (encode.request([1], [RED], None), [wire.PREPARING, wire.PREPARED]),
        (encode.request([1], [HTML], None), [wire.PREPARING, wire.PREPARED]),
        (role.health_check(), []),
    ):
        sender = FakeSender()
        async for _ in service.generate(asked, FakeContext(), sender):
            pass
        *before, last = sender.chunks
        assert before == stages and last["finish_reason"]


async def test_limits_of_the_encoder_are_no_fault_of_the_client(role: encode.Encode) -> None:
    """Another worker may take it: those who ask must not hear a refusal."""
    with pytest.raises(InvalidRequest, match="2 videos in one request; this worker takes 1"):
        await job_for(role, *[MediaRef("video", "http://a/b")] * 2)
    with pytest.raises(TooLong):
        await job_for(role, RED, tokens=4096)


async def test_prompt_that_its_media_make_too_long_comes_back_with_the_limit(role: encode.Encode) -> None:
    error = await refusal(role, RED, tokens=4094)
    assert isinstance(error, TooLong) and error.parameter == "prompt" and "4097 tokens" in str(error)
    job = await job_for(role, RED, tokens=4094)
    assert job.answer is not None and job.answer.transfer is not None
    assert job.answer.transfer["refused"]["context_length"] == 4096


# --- the side that asks ----------------------------------------------------------------------------------


class Answering:
    """Encode workers that give this answer; none at all where it is None."""

    def __init__(self, answer: encode.Handoff | Exception | None) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.cancelled = asyncio.Event()

    async def encode(self, job_id: str, request: dict[str, Any]) -> encode.Handoff:
        self.asked.append(job_id)
        if self.answer is None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.cancelled.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer


class Taking(FakeEncoded):
    """Takes what encoders made, where their files are as they should be."""

    broken: str | None = None

    async def read(self, name: str) -> object:
        if self.broken:
            raise Unusable(self.broken)
        return await super().read(name)


class Asking:
    def __init__(self, answer: Any, by_connector: bool = False, has_own_names: bool = False) -> None:
        self.encoders = Answering(answer)
        self.has_own_names = has_own_names
        self.engine = make_engine()
        self.by_hand = None if by_connector else Taking()
        self.lost = 0

    def count(self) -> None:
        self.lost += 1

    async def read(self, loader: Loader, *refs: MediaRef, names: tuple[str, ...] = ()) -> MediaPrompt:
        own = MediaReader(self.engine.facts, loader, self.engine.parts.media)
        reader = EncodedReader(own, self.by_hand, self.encoders, self.count, self.has_own_names)
        return await reader.read([7], refs, None, names, "job-1")


def done(*names: str) -> encode.Handoff:
    return encode.Handoff([encode.EncodedMedium("image", name) for name in names])


async def test_encoders_output_stands_for_pixels(loader: Loader) -> None:
    asking = Asking(done(A, B))
    seen = await asking.read(loader, RED, DARK, names=("0" * 16, "1" * 16))
    assert [medium.data for medium in seen.media] == [f"encoded {A}", f"encoded {B}"]
    assert [medium.name for medium in seen.media] == [f"{'0' * 16}-{A}", f"{'1' * 16}-{B}"]
    assert asking.encoders.asked == ["job-1"]
    assert asking.lost == 0


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        (NoEncoder("it is gone"), None),
        (done(A), None),  # of two media
        (encode.Handoff([encode.EncodedMedium("image", A), encode.EncodedMedium("video", B)]), None),
        (done(A, B), "its shape is (3, 8)"),
    ],
)
async def test_whatever_fails_is_encoded_here(answer: Any, broken: str | None, loader: Loader) -> None:
    asking = Asking(answer)
    assert asking.by_hand is not None
    asking.by_hand.broken = broken
    seen = await asking.read(loader, RED, DARK)
    assert [medium.data.size for medium in seen.media] == [(2, 2), (2, 2)]
    assert asking.lost == 1


async def test_connector_that_is_not_ours_gets_the_names_of_encode_workers(loader: Loader) -> None:
    ours = await Asking(done(A), by_connector=True).read(loader, RED, names=("0" * 16,))
    other = await Asking(done(A), by_connector=True, has_own_names=True).read(loader, RED, names=("0" * 16,))
    assert ours.media[0].name == f"{'0' * 16}-{other.media[0].name}"


class Hanging(Loader):
    """Of a server that never answers."""

    def __init__(self) -> None:
        self.left = False

    async def load_all(self, refs: Sequence[MediaRef]) -> list[MediaItem]:
        try:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        finally:
            self.left = True


@pytest.mark.parametrize("by_connector", [False, True])
async def test_what_an_encoder_refuses_is_refused_and_not_lost(by_connector: bool) -> None:
    """By connector it ends the own loading."""
    asking, own = Asking(MediaTooLarge("image 1 of 1: 9 MB"), by_connector), Hanging()
    with pytest.raises(MediaTooLarge, match="image 1 of 1: 9 MB"):
        await asking.read(own, RED)
    assert (own.left, asking.lost) == (by_connector, 0)


async def test_by_connector_the_media_are_read_here_too_under_the_same_names(
    loader: Loader, role: encode.Encode
) -> None:
    names = await names_of(role, await job_for(role, RED), RED)
    asking = Asking(done(*names), by_connector=True)
    (medium,) = (await asking.read(loader, RED)).media
    assert medium.data.size == (2, 2) and medium.name == names[0]
    assert asking.lost == 0


async def test_media_refused_here_end_the_work_of_the_encoder(loader: Loader) -> None:
    asking = Asking(None, by_connector=True)
    with pytest.raises(MediaTypeUnknown):
        await asking.read(loader, MediaRef("image", "data:image/png;base64,AAAA"))
    await asyncio.wait_for(asking.encoders.cancelled.wait(), 30)


async def test_client_that_leaves_ends_the_work_of_the_encoder(loader: Loader) -> None:
    asking = Asking(None)
    reading = asyncio.create_task(asking.read(loader, RED))
    while not asking.encoders.asked:
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert asking.encoders.cancelled.is_set()
    assert asking.lost == 0


# --- over the runtime ------------------------------------------------------------------------------------


class FakeClient:
    """The runtime's: each encode worker sends these chunks, and is silent after an Ellipsis."""

    def __init__(self, *workers: list[Any]) -> None:
        self.workers = workers
        self.asked: list[int] = []

    def instance_ids(self) -> list[int]:
        return [*range(len(self.workers))]

    async def direct(self, request: Any, instance: int, **_: Any) -> AsyncIterator[Any]:
        self.asked.append(instance)
        return self._chunks(self.workers[instance])

    async def _chunks(self, chunks: list[Any]) -> AsyncIterator[Any]:
        for chunk in chunks:
            if chunk is ...:
                await asyncio.get_running_loop().create_future()
            if isinstance(chunk, float):
                await asyncio.sleep(chunk)
            else:
                yield chunk


def over(client: FakeClient, seconds: float = 30.0, loading_seconds: float = 30.0) -> EncodeWorkers:
    found: Any = client
    return EncodeWorkers(found, seconds, loading_seconds, context_length=4096)


def chunk(told: Any) -> wire.Chunk:
    return {"token_ids": [], "index": 0, "finish_reason": "stop", "disaggregated_params": told}


HANDED = chunk({"encoded": [{"kind": "image", "name": A}]})


@pytest.mark.parametrize("stages", [[], [wire.PREPARING, wire.PREPARED]])
async def test_a_refusal_ends_the_asking(stages: list[wire.Chunk]) -> None:
    refused = {"status": 413, "message": "image 1 of 1: 9 MB", "parameter": "messages"}
    client = FakeClient(*[[*stages, chunk({"refused": refused})]] * 2)
    with pytest.raises(MediaTooLarge) as raised:
        await over(client).encode("j", {})
    assert str(raised.value) == "messages: image 1 of 1: 9 MB"
    assert len(client.asked) == 1


async def test_a_prompt_too_long_is_refused_where_both_have_the_same_limit() -> None:
    def too_long(limit: int) -> FakeClient:
        refused = {"status": 400, "message": "prompt has 5000 tokens", "context_length": limit}
        return FakeClient([chunk({"refused": refused})])

    with pytest.raises(TooLong, match="5000 tokens"):
        await over(too_long(4096)).encode("j", {})
    with pytest.raises(NoEncoder, match="--max-model-len 2048"):
        await over(too_long(2048)).encode("j", {})


async def test_an_answer_that_is_not_understood_is_a_lost_encoder() -> None:
    later = {"status": 418, "message": "of a later version"}
    odd = [
        {"refused": later},
        {"refused": {"status": 400}},
        {"refused": None},
        {"encoded": None},
        {},
        [],
        None,
    ]
    for told in odd:
        client = FakeClient([chunk(told)], [wire.PREPARING])
        with pytest.raises(NoEncoder, match="sent an invalid answer"):
            await over(client).encode("j", {})
        assert sorted(client.asked) == [0, 1]


async def test_loading_of_media_is_waited_for_and_the_encoder_is_not() -> None:
    """The patience is 50 ms, and loading takes longer."""
    loads = [wire.PREPARING, 0.2, wire.PREPARED, HANDED]
    assert await over(FakeClient(loads), 0.05).encode("j", {}) == done(A)
    for hangs in ([...], [wire.PREPARING, wire.PREPARED, ...]):
        async with asyncio.timeout(30):
            with pytest.raises(NoEncoder, match="--encoder-seconds 0.05"):
                await over(FakeClient(hangs), 0.05).encode("j", {})


async def test_loading_that_never_ends_is_left() -> None:
    with pytest.raises(NoEncoder, match="in time"):
        await over(FakeClient([wire.PREPARING, ...]), 0.05, 0.05).encode("j", {})
