"""Files that are not what they seem, over real HTTP: each is refused with its status, in time and memory."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from PIL import Image

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.base import MEGABYTE, MEGAPIXEL, Audio, Kind, MediaLimits, MediaRef, Video
from dynamo_vllm.media.decode import decode_process
from dynamo_vllm.media.decode.frame_sampling import UNKNOWN, Sampler
from dynamo_vllm.media.loader import Loader
from harness import media
from harness.bad_server import BadServer
from harness.processes import command_line
from harness.waiting import until_async
from runtime.conftest import MakeLoader

LIMITS = MediaLimits(
    max_bytes=8 * MEGABYTE,
    max_pixels=4 * MEGAPIXEL,
    max_video_pixels=MEGAPIXEL,
    max_frames=64,
    max_seconds=30,
    timeout_seconds=60,
)
MOST_GROWTH = 64 * MEGABYTE
PNG, JPEG = media.picture(), media.picture("JPEG", size=(300, 200))


@pytest.fixture
def loader(make: MakeLoader) -> Loader:
    return make(LIMITS)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.class", b"x" * 100)
    return buffer.getvalue()


def in_comment(text: bytes) -> bytes:
    """A JPEG whose first segment is a comment."""
    return JPEG[:2] + b"\xff\xfe" + struct.pack(">H", len(text) + 2) + text + JPEG[2:]


def of_many_scans() -> bytes:
    return JPEG[:-2] + b"\xff\xda" * 101 + JPEG[-2:]


def webp_that_claims(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_that_claims(width: int, height: int) -> bytes:
    data = bytearray(media.picture("GIF", "P"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def with_text_bomb(png: bytes) -> bytes:
    text = b"comment\0\0" + zlib.compress(bytes(64 * MEGABYTE))
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    return png[:33] + chunk + png[33:]


BROKEN = "broken or cut off"
SVG = (
    b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
)
File = tuple[bytes | Callable[[Path], bytes], int, str]
PICTURES: dict[str, File] = {
    "bomb of 50000x50000": (media.png_that_claims(50_000, 50_000), 413, "pixels; the limit is 4 million"),
    "bomb of 2^31": (media.png_that_claims(2**31 - 1, 2**31 - 1), 413, "pixels; the limit"),
    "one pixel row too many": (media.png_that_claims(2000, 2001), 413, "limit is 4 million"),
    "webp bomb": (webp_that_claims(1 << 24, 1 << 24), 413, "16777216x16777216"),
    "gif bomb": (gif_that_claims(65535, 65535), 413, "pixels; the limit"),
    "jpeg of many scans": (of_many_scans(), 400, "scans"),
    "svg": (SVG, 415, "SVG"),
    "svg without a head": (b"  <svg onload='x()'/>", 415, "SVG"),
    "html": (b"<!DOCTYPE html><html>", 415, "HTML"),
    "nothing": (b"", 415, "format is unknown"),
    "pdf": (b"%PDF-1.7", 415, "PDF"),
    "postscript, which Pillow would run": (b"%!PS-Adobe-3.0 EPSF-3.0", 415, "format is unknown"),
    "tiff": (media.picture("TIFF"), 415, "TIFF"),
    "ico": (media.picture("ICO", size=(16, 16)), 415, "format is unknown"),
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", 415, "playlist"),
    "sound": (media.sound(), 415, r"this is audio \(WAV\)"),
    "picture and archive": (PNG + zipped(), 415, "document of another type"),
    "picture and page": (in_comment(b"<html><script>alert(1)</script>"), 415, "document of another type"),
    "picture and php": (in_comment(b"<?php system('id'); ?>"), 415, "document of another type"),
    "page before the picture": (b"<html>" + PNG, 415, "HTML"),
    "truncated png": (media.picture(size=(200, 200))[:-2000], 400, BROKEN),
    "truncated jpeg": (JPEG[: len(JPEG) // 2], 400, BROKEN),
    "truncated webp": (media.picture("WEBP", size=(200, 200))[:100], 400, BROKEN),
    "truncated gif": (media.picture("GIF", "P", size=(200, 200))[:900], 400, BROKEN),
    "magic of a jpeg": (b"\xff\xd8\xff", 400, BROKEN),
    "magic of a webp": (b"RIFF\0\0\0\0WEBP", 400, BROKEN),
    "bmp of nothing": (b"BM" + bytes(60), 400, BROKEN),
    "png with a wrong sum": (PNG[:40] + b"\0\0\0\0" + PNG[44:], 400, BROKEN),
    "png of a text bomb": (with_text_bomb(PNG), 400, BROKEN),
}


def claims_to_be_longer(data: bytes) -> bytes:
    """An AVI whose header counts two thousand million frames."""
    at = data.index(b"strh") + 8 + 32
    return data[:at] + struct.pack("<I", 2_000_000_000) + data[at + 4 :]


def emptied(data: bytes) -> bytes:
    """An MP4 of zeros between its boxes."""
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    return data[:start] + bytes(end - start) + data[end:]


def without_index(data: bytes) -> bytes:
    return data[: data.index(b"moov") - 4]


VIDEOS: dict[str, File] = {
    "too long": (lambda folder: media.video(folder, frames=70, rate=2.0), 413, "longer than 30 s"),
    "cut off avi": (lambda folder: media.video(folder, "a.avi", "MJPG")[:-6000], 400, "AVI is cut off"),
    "cut off mp4": (lambda folder: media.video(folder)[:-10], 400, "MP4 is cut off"),
    "frames of nothing": (lambda folder: emptied(media.video(folder)), 400, "no frames"),
    "without its index": (lambda folder: without_index(media.video(folder)), 400, "broken"),
    "magic alone": (b"\0\0\0\x18ftypmp42" + bytes(16), 400, "broken"),
    "noise behind the magic": (b"\x1aE\xdf\xa3" + os.urandom(5000), 400, "broken"),
    "a lie about its length": (
        lambda folder: claims_to_be_longer(media.video(folder, "a.avi", "MJPG")),
        413,
        "longer than 30 s",
    ),
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", 415, "playlist"),
    "heif": (b"\0\0\0\x18ftypheic" + bytes(16), 415, "HEIF"),
    "picture": (PNG, 415, r"this is image \(PNG\)"),
}
SOUNDS: dict[str, File] = {
    "too long": (media.sound(seconds=31, rate=1000), 413, "lasts 31 s; the limit is 30 s"),
    "cut off": (media.sound()[:-100], 400, "cut off"),
    "magic alone": (b"RIFF\0\0\0\0WAVE", 400, "cut off"),
    "audio is empty": (media.sound(seconds=0), 400, "audio is empty"),
    "no channels": (media.sound()[:22] + bytes(2) + media.sound()[24:], 400, "0 channels"),
    "mu-law": (media.sound()[:20] + b"\x07\0" + media.sound()[22:], 415, "encoding 7"),
    "picture": (PNG, 415, r"this is image \(PNG\)"),
}
FILES: dict[Kind, dict[str, File]] = {"image": PICTURES, "video": VIDEOS, "audio": SOUNDS}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, files in FILES.items() for name in files], ids=str
)
async def test_file_that_is_no_good_is_refused(
    server: BadServer, loader: Loader, tmp_path: Path, kind: Kind, name: str
) -> None:
    file, status, match = FILES[kind][name]
    url = server.file("/a", file if isinstance(file, bytes) else file(tmp_path), "Content-Type: image/png")
    await loader.load(MediaRef("image", server.file("/warm", PNG)))
    process = psutil.Process()
    before = process.memory_info().rss
    with pytest.raises(MediaRefused, match=match) as caught:
        await loader.load(MediaRef(kind, url))
    assert caught.value.status == status
    assert process.memory_info().rss - before < MOST_GROWTH
    assert decoders() == []


def decoders() -> list[psutil.Process]:
    """Return our children but the zygote of workers, which tests before these may have started."""
    return [child for child in psutil.Process().children() if "harness.forks" not in command_line(child)]


async def test_hundred_pictures_are_refused_before_one_is_fetched(server: BadServer, loader: Loader) -> None:
    refs = [MediaRef("image", server.file("/a", PNG))] * 100
    with pytest.raises(MediaRefused, match="100 image parts; this worker takes at most 16") as caught:
        await loader.load_all(refs)
    assert caught.value.status == 413
    assert server.requests == []


async def test_error_names_the_part_among_its_kind(server: BadServer, loader: Loader) -> None:
    good, bad = MediaRef("image", server.file("/a", PNG)), MediaRef("image", server.file("/b", b"x"))
    sound = MediaRef("audio", server.file("/c", media.sound()))
    with pytest.raises(MediaRefused, match="^image 2 of 3: "):
        await loader.load_all([sound, good, bad, good])


async def test_same_picture_at_once_is_decoded_once(
    server: BadServer, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    really = Image.open

    def count(*args: object, **kwargs: object) -> Image.Image:
        opened.append(args)
        return really(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Image, "open", count)
    data = media.picture("JPEG", size=(1500, 1500))
    items = await loader.load_all([MediaRef("image", server.file(f"/{n}", data)) for n in range(8)])
    assert len(opened) == 1
    assert len({id(item) for item in items}) == 1
    other = await loader.load(MediaRef("image", server.file("/other", PNG)))
    assert other.key != items[0].key


async def test_url_whose_content_changes_gives_the_new_content(server: BadServer, loader: Loader) -> None:
    first = await loader.load(MediaRef("image", server.file("/a", PNG)))
    second = await loader.load(MediaRef("image", server.file("/a", JPEG)))
    assert first.key != second.key


async def test_leaving_one_of_two_who_wait_leaves_the_other(
    server: BadServer, make: MakeLoader, tmp_path: Path
) -> None:
    """Both wait for the same video; the first is cancelled."""
    loader = make(LIMITS)
    ref = MediaRef("video", server.file("/a", media.video(tmp_path)))
    first, second = (asyncio.create_task(loader.load(ref)) for _ in range(2))
    await until_async("the decoder", lambda: decoders())
    first.cancel()
    assert isinstance((await second).data, Video)
    assert first.cancelled()


async def test_video_and_sound_come_over_http(server: BadServer, loader: Loader, tmp_path: Path) -> None:
    video, sound = await loader.load_all(
        [
            MediaRef("video", server.file("/v", media.video(tmp_path, frames=40))),
            MediaRef("audio", server.file("/s", media.sound(channels=2))),
        ]
    )
    assert isinstance(video.data, Video) and isinstance(sound.data, Audio)
    assert video.data.frames.shape == (32, 48, 64, 3)
    assert video.data.metadata["total_num_frames"] == 40
    assert len(video.data.metadata["frames_indices"]) == 32
    assert (sound.data.samples.shape, sound.data.rate) == ((4000,), 8000)


async def test_video_of_too_many_pixels_is_refused(
    server: BadServer, make: MakeLoader, tmp_path: Path
) -> None:
    ref = MediaRef("video", server.file("/a", media.video(tmp_path)))
    for limits, match in (
        (MediaLimits(max_pixels=3000), "64x48 pixels per frame"),
        (MediaLimits(max_video_pixels=60_000), "the 32 frames selected"),
    ):
        with pytest.raises(MediaRefused, match=match) as caught:
            await make(limits).load(ref)
        assert caught.value.status == 413


async def test_video_for_a_model_of_unknown_ways_is_refused(
    server: BadServer, make: MakeLoader, tmp_path: Path
) -> None:
    with pytest.raises(MediaRefused, match="not supported for this model"):
        await make(LIMITS, sampler=UNKNOWN).load(MediaRef("video", server.file("/a", media.video(tmp_path))))


async def test_decoder_that_dies_is_one_refused_request(
    server: BadServer, make: MakeLoader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a fault of a native decoder would: the process ends while the frames are chosen."""

    def kill(total: int, rate: float) -> list[int]:
        (child,) = decoders()
        os.kill(child.pid, signal.SIGSEGV)
        return [0]

    loader = make(LIMITS, sampler=Sampler("kill", kill))
    with pytest.raises(MediaRefused, match="its decoder crashed"):
        await loader.load(MediaRef("video", server.file("/a", media.video(tmp_path))))
    assert f"ended with code {-signal.SIGSEGV}" in caplog.text


async def test_decoder_that_hangs_is_ended(server: BadServer, make: MakeLoader, tmp_path: Path) -> None:
    def stop(total: int, rate: float) -> list[int]:
        (child,) = decoders()
        os.kill(child.pid, signal.SIGSTOP)
        return [0]

    loader = make(MediaLimits(timeout_seconds=1.2), sampler=Sampler("stop", stop))
    with pytest.raises(MediaRefused, match="within 1.2 s"):
        await loader.load(MediaRef("video", server.file("/a", media.video(tmp_path))))
    await until_async("the end of the decoder", lambda: not decoders())


@pytest.mark.parametrize("magic", [b"fLaC", b"OggS", b"ID3\x03"])
async def test_compressed_sound_is_decoded_apart(
    server: BadServer, loader: Loader, magic: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fault of its decoder would."""
    monkeypatch.setattr(decode_process, "_START", "import os; os.abort()")
    with pytest.raises(MediaRefused, match="its decoder crashed"):
        await loader.load(MediaRef("audio", server.file("/a", magic + bytes(2000))))


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
async def test_random_bytes_behind_a_good_beginning_are_only_ever_refused(
    server: BadServer, loader: Loader, tmp_path: Path, kind: Kind
) -> None:
    """A little fuzzing: whatever comes, it is loaded or refused, and nothing else."""
    noise = random.Random(5)
    good = {
        "image": [media.picture(name) for name in ("PNG", "JPEG", "WEBP", "BMP")],
        "video": [media.video(tmp_path, "a.avi", "MJPG", frames=5)],
        "audio": [media.sound()],
    }[kind]
    for number in range(4 if kind == "video" else 120):
        data = bytearray(good[number % len(good)])
        for _ in range(noise.randrange(1, 20)):
            data[noise.randrange(12, len(data))] = noise.randrange(256)
        try:
            await loader.load(MediaRef(kind, media.data_url(bytes(data))))
        except MediaRefused as exc:
            assert exc.status in (400, 413, 415)


async def test_description_of_a_broadcast_opens_no_socket(loader: Loader) -> None:
    """It begins as a WebM does; FFmpeg would listen at the address it names."""
    description = (
        b"\x1aE\xdf\xa3\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
        b"m=video 45678 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
    )
    task = asyncio.create_task(loader.load(MediaRef("video", media.data_url(description, "video/webm"))))
    heard = set()
    while not task.done():
        heard |= set(udp_addresses())
        await asyncio.sleep(0.01)
    with pytest.raises(MediaRefused):
        await task
    assert not [address for address in heard if address.endswith((f":{45678:04X}", f":{45679:04X}"))]


def udp_addresses() -> list[str]:
    return [line.split()[1] for line in Path("/proc/net/udp").read_text().splitlines()[1:]]
