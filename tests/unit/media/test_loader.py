"""The loader without a network: counts, keys, options, who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.errors import MediaRefused, Overloaded
from dynamo_vllm.media.base import MEGABYTE, MediaLimits, MediaRef
from dynamo_vllm.media.decode import audio, image
from dynamo_vllm.media.loader import Loader, from_options, make_loader
from harness import media
from harness.waiting import until_async

PNG = media.picture()
Make = Callable[..., Loader]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    loaders: list[Loader] = []

    def one_more(*args: Any, **settings: Any) -> Loader:
        loaders.append(make_loader(*args, **settings))
        return loaders[-1]

    yield one_more
    for loader in loaders:
        await loader.aclose()


@pytest.fixture
def loader(make: Make) -> Loader:
    return make(MediaLimits(per_request={"image": 2}), cache_bytes=1300)


async def test_key_is_of_the_content_and_of_nothing_else(loader: Loader, make: Make, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(PNG)
    here = make(folder=tmp_path)
    first = await loader.load(MediaRef("image", media.data_url(PNG)))
    again = await loader.load(MediaRef("image", media.data_url(PNG, "text/html")))
    file = await here.load(MediaRef("image", f"file://{tmp_path}/a"))
    other = await loader.load(MediaRef("image", media.data_url(media.picture("BMP"))))
    assert first is again
    assert first.key == file.key != other.key
    assert (len(first.key), first.size) == (64, 12 * 8 * 4)


async def test_counts_per_kind_and_lengths_of_urls_are_checked_first(loader: Loader) -> None:
    good = MediaRef("image", media.data_url(PNG))
    assert await loader.load_all([]) == []
    assert len(await loader.load_all([good, good])) == 2
    with pytest.raises(MediaRefused, match="3 image parts; this worker takes at most 2") as caught:
        await loader.load_all([good, MediaRef("image", "nonsense"), good])
    assert caught.value.status == 413
    with pytest.raises(MediaRefused, match="1 video parts; this worker takes at most 0"):
        await loader.load(MediaRef("video", media.data_url(PNG)))
    with pytest.raises(MediaRefused, match="more than 8192 characters"):
        await loader.load(MediaRef("image", "http://example.com/" + "a" * 9000))


async def test_fault_of_ours_comes_as_itself(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dynamo_vllm.media.decode.image.decode", fail)
    with pytest.raises(MemoryError):
        await loader.load_all([MediaRef("image", media.data_url(PNG))] * 2)


async def test_cache_stays_within_its_bytes(loader: Loader) -> None:
    """Of 1300 bytes; a picture takes 384 to 608."""
    for width in range(12, 20):
        await loader.load(MediaRef("image", media.data_url(media.picture(size=(width, 8)))))
    assert loader.cache.bytes <= 1300
    assert len(loader.cache) == 2


async def test_cancelling_everybody_who_waits_spoils_nothing_for_the_next(loader: Loader) -> None:
    ref = MediaRef("image", media.data_url(media.picture(size=(100, 100))))
    for _ in range(10):
        waiting = [asyncio.create_task(loader.load(ref)) for _ in range(3)]
        for _ in range(3):
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        fresh = asyncio.create_task(loader.load(ref))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(not isinstance(result, Exception) for result in results)  # done or cancelled
        assert (await fresh).kind == "image"


def different(count: int) -> list[MediaRef]:
    return [MediaRef("image", media.data_url(media.picture(size=(9 + n, 8)))) for n in range(count)]


class Stuck:
    """Decodes when it is told to."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.begun = 0
        self._decode = module.decode
        monkeypatch.setattr(module, "decode", self)

    def __call__(self, *given: Any) -> Any:
        self.begun += 1
        assert self.go_on.wait(30)
        return self._decode(*given)

    async def begins(self, count: int) -> None:
        await until_async(f"{count} that begin", lambda: self.begun >= count)


async def test_turn_that_does_not_come_is_not_the_clients_fault(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(image, monkeypatch)
    made = make(MediaLimits(queue_seconds=0.1), threads=1)
    one, other = different(2)
    first = asyncio.create_task(made.load(one))
    await stuck.begins(1)
    with pytest.raises(
        Overloaded, match=r"image 1 of 1: waited more than 0.1 s in a queue \(--media-queue-seconds"
    ) as got:
        await made.load(other)
    assert got.value.status == 503
    stuck.go_on.set()
    assert (await first).kind == "image"
    assert (await made.load(other)).kind == "image", "the place is free again"


async def test_same_picture_is_decoded_once_also_by_those_who_wait_for_a_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(image, monkeypatch)
    made = make(threads=1)
    one, other = different(2)
    loading = [asyncio.create_task(made.load(ref)) for ref in (one, other, other, other)]
    await stuck.begins(1)
    stuck.go_on.set()
    _, *same = await asyncio.gather(*loading)
    assert stuck.begun == 2
    assert same[0] is same[1] is same[2]


async def test_slow_sounds_leave_threads_for_pictures(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(audio, monkeypatch)
    made = make(threads=2)
    sounds = [MediaRef("audio", media.data_url(media.sound(seconds=n))) for n in (1, 2, 3)]
    slow = asyncio.create_task(made.load_all(sounds))
    await stuck.begins(1)
    assert (await asyncio.wait_for(made.load(different(1)[0]), 30)).kind == "image"
    assert stuck.begun == 1
    stuck.go_on.set()
    assert len(await slow) == 3


async def test_options_become_limits(tmp_path: Path) -> None:
    reach: dict[str, Any] = {"media_networks": ("10.0.0.0/8",), "media_hosts": ("a.example",)}
    made = from_options(
        WorkerOptions(media_max_mb=1, media_max_images=1, media_folder=str(tmp_path), **reach)
    )
    (tmp_path / "big").write_bytes(bytes(MEGABYTE + 1))
    for urls, match in (
        ([f"file://{tmp_path}/big"], "larger than 1 MB"),
        (["x", "x"], "takes at most 1"),
        (["http://b.example/"], "not among those"),
    ):
        with pytest.raises(MediaRefused, match=match):
            await made.load_all([MediaRef("image", url) for url in urls])
    await made.aclose()


def test_defaults_of_flags_and_limits_agree() -> None:
    options, limits = WorkerOptions(), MediaLimits()
    assert options.media_max_mb * MEGABYTE == limits.max_bytes
    assert options.media_max_megapixels * 1e6 == limits.max_pixels
    assert options.media_max_video_megapixels * 1e6 == limits.max_video_pixels
    for name in ("max_frames", "max_seconds", "timeout_seconds", "queue_seconds", "redirects"):
        assert getattr(options, f"media_{name}") == getattr(limits, name), name
    for kind in ("image", "video", "audio"):
        assert getattr(options, f"media_max_{kind}s") == limits.per_request[kind], kind
