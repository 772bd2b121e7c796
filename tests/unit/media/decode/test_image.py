"""Pictures: only the decoder of the sniffed type, upright, RGB."""

from __future__ import annotations

import struct
import zlib

import pytest
from PIL import Image

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.base import MediaLimits
from dynamo_vllm.media.cancellation import Deadline
from dynamo_vllm.media.decode import image
from dynamo_vllm.media.decode.sniff import FORMATS, sniff
from harness import media

BY_NAME = {item.name: item for item in FORMATS}


def decode(data: bytes, name: str | None = None) -> Image.Image:
    format = BY_NAME[name] if name else sniff(data, "image")
    return image.decode(data, format, MediaLimits(), Deadline(5))[0]


def test_type_is_known_by_its_bytes_and_decoded_by_no_other_decoder() -> None:
    for name in (item.name for item in FORMATS if item.kind == "image"):
        data = media.picture(name)
        assert sniff(data, "image").name == name
        assert (decode(data).mode, decode(data).size) == ("RGB", (12, 8))
    with pytest.raises(MediaRefused, match="the PNG is broken"):
        decode(media.picture("GIF"), "PNG")


def test_picture_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(media.picture("JPEG", exif=exif)).size == (8, 12)


def test_transparency_lies_over_white() -> None:
    clear = Image.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert image._to_rgb(clear).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_picture_is_no_other_kind(kind: str) -> None:
    with pytest.raises(MediaRefused, match=r"this is image \(PNG\)") as caught:
        sniff(media.picture(), kind)  # type: ignore[arg-type]
    assert caught.value.status == 415


def test_picture_of_countless_segments_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_READS", 500)
    png = media.picture("PNG")
    empty = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    assert decode(png[:33] + empty * 100 + png[33:]).size == (12, 8)
    with pytest.raises(MediaRefused, match="too many segments"):
        decode(png[:33] + empty * 500 + png[33:])


def test_decoder_is_stopped_when_its_time_is_over() -> None:
    watch = Deadline(5)
    source = image._LimitedReader(media.picture(), watch)
    source.read(8)
    watch.stop()
    with pytest.raises(MediaRefused, match="not decoded within 5 s"):
        source.read(8)
