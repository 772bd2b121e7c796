"""Loads media from references: count, fetch, identify by content, decode once, keep within limits."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dynamo_vllm.errors import MediaRefused, MediaTooLarge, Overloaded
from dynamo_vllm.media.admission import TimeBudget, release_all
from dynamo_vllm.media.base import KINDS, MEGABYTE, MEGAPIXEL, LoaderCapacity, MediaItem, MediaLimits
from dynamo_vllm.media.cache import MediaCache
from dynamo_vllm.media.cancellation import Deadline
from dynamo_vllm.media.decode import audio, image, sniff, video
from dynamo_vllm.media.decode.frame_sampling import SAMPLERS
from dynamo_vllm.media.fetch import addresses, file_urls
from dynamo_vllm.media.fetch import http as fetch_http
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.held_bytes import MediaMemory, holding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.media.admission import Slots
    from dynamo_vllm.media.base import Audio, Kind, MediaRef, Pixels, PixelSource, Video
    from dynamo_vllm.media.decode.frame_sampling import Sampler
    from dynamo_vllm.media.held_bytes import Hold

HASH_INLINE_BYTES = 1 << 18
"""Up to this size hashing is quicker than handing it to a thread."""
SPEECH_RATE = 48_000
"""Samples a second of the longest sound to transcribe; with more of them it must be shorter."""
SLOWEST_DECODER = 100.0
"""Seconds of sound that a decoder gives in a second, at least; libsndfile gives about 200 of stereo MP3."""


def make_loader(
    limits: MediaLimits | None = None,
    *,
    folder: Path | None = None,
    reach: Reach | None = None,
    sampler: Sampler = SAMPLERS["opencv"],
    pixels: PixelSource | None = None,
    **capacity: int,
) -> Loader:
    """`sampler` chooses the frames of videos; `capacity` has fields of `LoaderCapacity`.

    `pixels` reads images that the frontend decoded; without it they are refused.
    """
    return Loader(
        limits or MediaLimits(), folder, reach or Reach(), LoaderCapacity(**capacity), sampler, pixels
    )


def from_options(
    options: WorkerOptions, sampler: Sampler = SAMPLERS["opencv"], pixels: PixelSource | None = None
) -> Loader:
    """Build the limits from the operator's flags."""
    limits = MediaLimits(
        max_bytes=int(options.media_max_mb * MEGABYTE),
        max_pixels=int(options.media_max_megapixels * MEGAPIXEL),
        max_video_pixels=int(options.media_max_video_megapixels * MEGAPIXEL),
        max_frames=options.media_max_frames,
        max_seconds=options.media_max_seconds,
        timeout_seconds=options.media_timeout_seconds,
        queue_seconds=options.media_queue_seconds,
        redirects=options.media_redirects,
        per_request={
            "image": options.media_max_images,
            "video": options.media_max_videos,
            "audio": options.media_max_audios,
        },
    )
    return make_loader(
        limits,
        folder=Path(options.media_folder) if options.media_folder else None,
        reach=Reach.of(options),
        sampler=sampler,
        pixels=pixels,
        at_once=options.media_at_once,
        threads=options.media_threads,
        cache_bytes=int(options.media_cache_mb * MEGABYTE),
        memory_bytes=int(options.media_memory_mb * MEGABYTE),
    )


def for_speech(options: WorkerOptions) -> Loader:
    """Build a loader of sounds to transcribe: longer ones, and none twice, so without a cache."""
    seconds = options.max_speech_seconds
    limits = MediaLimits(
        max_bytes=int(options.media_max_mb * MEGABYTE),
        max_seconds=seconds,
        max_speech_bytes=int(seconds * SPEECH_RATE * 4),
        timeout_seconds=options.media_timeout_seconds + seconds / SLOWEST_DECODER,
        queue_seconds=options.media_queue_seconds,
        per_request={"audio": 1},
    )
    return make_loader(
        limits,
        at_once=options.media_at_once,
        threads=options.media_threads,
        cache_bytes=0,
        memory_bytes=int(options.media_memory_mb * MEGABYTE),
    )


@dataclass(frozen=True, slots=True)
class _Budgets:
    """The time budgets of one item."""

    working: TimeBudget
    waiting: TimeBudget


@dataclass(slots=True)
class _Decoding:
    """Work that several requests may wait for."""

    result: asyncio.Future[MediaItem]
    watch: Deadline
    waiting: int = 0


class Loader:
    """One per worker; used in one event loop."""

    def __init__(
        self,
        limits: MediaLimits,
        folder: Path | None,
        reach: Reach,
        capacity: LoaderCapacity,
        sampler: Sampler,
        pixels: PixelSource | None = None,
    ) -> None:
        at_once, threads = capacity.at_once, capacity.threads
        self._limits = limits
        self._folder = folder
        self._sampler = sampler
        self._pixels = pixels
        self.cache = MediaCache(capacity.cache_bytes)
        self.memory = MediaMemory(capacity.memory_bytes)
        self._decoding: dict[str, _Decoding] = {}
        self._slots = asyncio.Semaphore(at_once)
        self._slots_per_request = max(1, at_once // 8)
        self._servers = asyncio.Semaphore(max(1, at_once // 2))  # half is for items without a server
        self._slots_per_host = max(1, at_once // 4)
        self._hosts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._decoders = ThreadPoolExecutor(threads, "media-decode")
        self._threads = asyncio.Semaphore(threads)  # nothing waits inside the pool: it could not be cancelled
        self._threads_for_slow = asyncio.Semaphore(max(1, threads // 2))  # images continue beside videos
        self._readers = ThreadPoolExecutor(at_once, "media-read")
        self._resolvers = ThreadPoolExecutor(at_once, "media-dns")  # a name server may block them for long
        self._client = fetch_http.MediaClient(limits, reach, addresses.system_resolver(self._resolvers))

    async def load(self, ref: MediaRef) -> MediaItem:
        return (await self.load_all([ref]))[0]

    async def load_all(self, refs: Sequence[MediaRef]) -> list[MediaItem]:
        self._check_counts(refs)
        mine = asyncio.Semaphore(self._slots_per_request)  # a request with many slow URLs blocks nobody else
        with holding() as hold:
            if len(refs) == 1:
                return [await self._load(refs[0], _describe_part(refs, 0), mine, hold)]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._load(ref, _describe_part(refs, index), mine, hold))
                        for index, ref in enumerate(refs)
                    ]
            except BaseExceptionGroup as failed:
                first = failed.exceptions[0]  # as one item alone would have failed
            else:
                return [task.result() for task in tasks]
            raise first

    def _check_counts(self, refs: Sequence[MediaRef]) -> None:
        for kind in KINDS:
            count, most = sum(ref.kind == kind for ref in refs), self._limits.per_request.get(kind, 0)
            if count > most:
                raise MediaTooLarge(f"{count} {kind} parts; this worker takes at most {most} per request")

    async def _load(self, ref: MediaRef, part: str, mine: asyncio.Semaphore, hold: Hold) -> MediaItem:
        seconds, queue_seconds = self._limits.timeout_seconds, self._limits.queue_seconds
        flags = "--media-queue-seconds, --media-memory-mb"
        budgets = _Budgets(
            TimeBudget(seconds, MediaRefused(f"not loaded within {seconds:g} s")),
            TimeBudget(
                queue_seconds,
                Overloaded(f"{part}: waited more than {queue_seconds:g} s in a queue ({flags})"),
            ),
        )
        async with mine:  # no timeout: it waits for its own items, which have theirs
            try:
                if ref.pixels is not None:
                    return await self._load_pixels(ref.pixels, hold, budgets)
                return await self._load_url(ref, hold, budgets)
            except MediaRefused as exc:
                raise type(exc)(f"{part}: {exc}") from exc

    async def _load_url(self, ref: MediaRef, hold: Hold, budgets: _Budgets) -> MediaItem:
        async with self.memory.turn(hold, (*self._fetch_slots(ref), self._slots), budgets.waiting):
            data = await budgets.working.spend(self._fetch(ref.url))
            self.memory.keep(hold, data, len(data))
        try:
            item = await self._decode_once(ref.kind, data, hold, budgets)
            self.memory.keep(hold, item, item.size)
            return item
        finally:
            self.memory.drop(hold, data)

    def _fetch_slots(self, ref: MediaRef) -> Slots:
        """Servers may use half of the slots, and one server half of these, so that others continue."""
        if ref.pixels is not None or _scheme(ref.url) in ("data", "file"):
            return ()
        _check_length(ref.url)
        host = fetch_http.Hop.parse(ref.url).host.rstrip(".")
        slots = self._hosts.get(host)  # while somebody has or wants one
        if slots is None:
            slots = self._hosts[host] = asyncio.Semaphore(self._slots_per_host)
        return slots, self._servers

    def _decoding_slots(self, kind: Kind) -> Slots:
        return (self._threads,) if kind == "image" else (self._threads_for_slow, self._threads)

    async def _load_pixels(self, pixels: Pixels, hold: Hold, budgets: _Budgets) -> MediaItem:
        if self._pixels is None:
            raise MediaRefused("this worker was started without --frontend-decoding")
        image.check_size(pixels.width, pixels.height, self._limits)  # before memory is taken for it
        async with self.memory.turn(hold, self._decoding_slots("image"), budgets.waiting):
            data = await budgets.working.spend(self._pixels.read(pixels))
            loop = asyncio.get_running_loop()
            item = await budgets.working.spend(loop.run_in_executor(self._decoders, self._wrap, data, pixels))
            self.memory.keep(hold, item, item.size)
            return item

    def _wrap(self, data: bytes, pixels: Pixels) -> MediaItem:
        """Read in a thread. Not cached: the pixels come each time, and reading them is the only cost."""
        made, size = image.from_pixels(data, pixels, self._limits)
        settings = f"pixels {pixels.height} {pixels.width} {pixels.channels}\0".encode()
        return MediaItem("image", made, _digest(settings, data), size)

    async def _fetch(self, url: str) -> bytes:
        loop = asyncio.get_running_loop()
        scheme = _scheme(url)
        max_bytes = self._limits.max_bytes
        if scheme == "data":
            return await loop.run_in_executor(self._readers, fetch_http.read_data_url, url, max_bytes)
        _check_length(url)
        if scheme == "file":
            return await loop.run_in_executor(
                self._readers, file_urls.read_file, url, self._folder, max_bytes
            )
        return await self._client.get(url)

    async def _decode_once(self, kind: Kind, data: bytes, hold: Hold, budgets: _Budgets) -> MediaItem:
        key = await budgets.working.spend(self._key(kind, data))
        found = self._find(key) or await self._begin(kind, data, key, hold, budgets)
        if isinstance(found, MediaItem):
            return found
        found.waiting += 1
        try:
            return await budgets.working.spend(asyncio.shield(found.result))
        finally:
            found.waiting -= 1
            if not found.waiting:
                self._drop(key, found)

    def _find(self, key: str) -> MediaItem | _Decoding | None:
        return self.cache.get(key) or self._decoding.get(key)

    async def _begin(
        self, kind: Kind, data: bytes, key: str, hold: Hold, budgets: _Budgets
    ) -> MediaItem | _Decoding:
        slots = self._decoding_slots(kind)
        await self.memory.take(hold, slots, budgets.waiting)
        found = self._find(key)
        if found is None:
            return self._start(kind, data, key, slots)
        release_all(slots)  # others had the same content and were first
        return found

    async def _key(self, kind: Kind, data: bytes) -> str:
        settings = f"{kind} {self._sampler.name if kind == 'video' else ''}\0".encode()
        if len(data) <= HASH_INLINE_BYTES:
            return _digest(settings, data)
        return await asyncio.get_running_loop().run_in_executor(self._readers, _digest, settings, data)

    def _start(self, kind: Kind, data: bytes, key: str, slots: Slots) -> _Decoding:
        watch = Deadline(self._limits.timeout_seconds)
        loop = asyncio.get_running_loop()
        thread = self._decoders.submit(self._decode, kind, data, key, watch)

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(release_all, slots)

        thread.add_done_callback(
            release
        )  # with the end of the thread, which may be after that of all waiters
        work = _Decoding(asyncio.wrap_future(thread), watch)
        self._decoding[key] = work

        def keep(result: asyncio.Future[MediaItem]) -> None:
            if not result.cancelled() and result.exception() is None:
                self.cache.put(result.result())

        work.result.add_done_callback(keep)  # before anybody who waits goes on
        return work

    def _drop(self, key: str, work: _Decoding) -> None:
        """Nobody waits any more: it is done, or its time is over."""
        if self._decoding.get(key) is work:
            del self._decoding[key]
        work.watch.stop()
        work.result.cancel()  # of use only before its thread has begun

    def _decode(self, kind: Kind, data: bytes, key: str, watch: Deadline) -> MediaItem:
        """In a thread."""
        watch.check()
        format = sniff.sniff(data, kind)
        made: Image | Video | Audio
        if kind == "image":
            made, size = image.decode(data, format, self._limits, watch)
        elif kind == "video":
            made, size = video.decode(data, format, self._sampler, self._limits, watch)
        else:
            made, size = audio.decode(data, format, self._limits, watch)
        return MediaItem(kind, made, key, size)

    async def aclose(self) -> None:
        for key, work in [*self._decoding.items()]:
            self._drop(key, work)
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._resolvers.shutdown(wait=False, cancel_futures=True)


def _check_length(url: str) -> None:
    if len(url) > fetch_http.MAX_URL:
        raise MediaRefused(f"the URL has more than {fetch_http.MAX_URL} characters")


def _scheme(url: str) -> str:
    return url[:8].partition(":")[0].lower()


def _digest(settings: bytes, data: bytes) -> str:
    hasher = hashlib.sha256(settings)
    hasher.update(data)
    return hasher.hexdigest()


def _describe_part(refs: Sequence[MediaRef], index: int) -> str:
    """image 2 of 3."""
    kind = refs[index].kind
    same = [number for number, ref in enumerate(refs) if ref.kind == kind]
    return f"{kind} {same.index(index) + 1} of {len(same)}"
