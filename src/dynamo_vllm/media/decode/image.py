"""Decodes images to the same pixels as vLLM's own loader: upright, RGB, transparency over white."""

from __future__ import annotations

import contextlib
from io import BytesIO
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from dynamo_vllm.errors import MediaRefused, MediaTooLarge
from dynamo_vllm.media.base import MEGAPIXEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_vllm.media.base import MediaLimits, Pixels
    from dynamo_vllm.media.cancellation import Deadline
    from dynamo_vllm.media.decode.sniff import MediaFormat

MAX_SCANS = 100
"""Scans of a JPEG. A normal progressive one has about ten; each is a pass over all pixels, whatever
its length.
"""
MAX_READS = 100_000
"""Reads by Pillow, which parses each segment separately, in Python: 8 MB of empty PNG chunks take 14 s."""
PIXEL_BYTES = 4
"""Pillow stores RGB in four bytes."""
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's modes, by the number of channels."""
_WHITE = (255, 255, 255)


def decode(data: bytes, format: MediaFormat, limits: MediaLimits, watch: Deadline) -> tuple[Image.Image, int]:
    """Return the first frame and the bytes it takes."""
    if format.name == "WEBP":
        check_size(*_webp_size(data), limits)  # Pillow allocates the memory while it opens the file
    if format.name == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:
        raise MediaRefused(f"a JPEG with more than {MAX_SCANS} scans is not supported")
    watch.check()
    with _decoder_errors_refused(format.name, limits):
        opened = Image.open(_LimitedReader(data, watch), formats=[format.name])
        check_size(*opened.size, limits)
        upright = _upright(opened)
        upright.load()
        image = _to_rgb(upright)
    image.info = {}  # EXIF, profiles and texts are not counted below, so they are not kept
    return image, image.width * image.height * PIXEL_BYTES


def from_pixels(data: bytes, pixels: Pixels, limits: MediaLimits) -> tuple[Image.Image, int]:
    """Return the same for an image that was decoded elsewhere."""
    check_size(pixels.width, pixels.height, limits)
    if len(data) != pixels.size:
        raise MediaRefused(f"the image has {len(data)} bytes instead of {pixels.size}")
    image = _to_rgb(Image.frombytes(MODES[pixels.channels], (pixels.width, pixels.height), data))
    return image, image.width * image.height * PIXEL_BYTES


class _LimitedReader(BytesIO):
    """Stops a decoder that exceeds its time, or that reads a file in tiny pieces."""

    def __init__(self, data: bytes, watch: Deadline) -> None:
        super().__init__(data)
        self._watch = watch
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._watch.check()
        self._reads += 1
        if self._reads > MAX_READS:
            raise MediaRefused("the image has too many segments")
        return super().read(size)


@contextlib.contextmanager
def _decoder_errors_refused(name: str, limits: MediaLimits) -> Iterator[None]:
    try:
        yield
    except MediaRefused:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # raised before the size is known
        raise _too_many_pixels("far too many", limits) from None
    except Exception as exc:
        # Pillow raises anything on malicious bytes: OSError, SyntaxError, struct.error, zlib.error, …
        raise MediaRefused(f"the {name} is broken or cut off") from exc


def check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_pixels:
        raise _too_many_pixels(f"{width}x{height}", limits)


def _too_many_pixels(many: str, limits: MediaLimits) -> MediaTooLarge:
    limit = f"{limits.max_pixels / MEGAPIXEL:g} million"
    return MediaTooLarge(f"the image has {many} pixels; the limit is {limit}")


def _upright(image: Image.Image) -> Image.Image:
    # As vLLM 0.30: a broken EXIF block leaves the image as it is.
    with contextlib.suppress(Exception):
        return ImageOps.exif_transpose(image)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    page = Image.new("RGB", layer.size, _WHITE)
    page.paste(layer, mask=layer.getchannel("A"))
    return page


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height of the canvas, from the first chunk."""
    chunk, body = data[12:16], data[20:30]
    if len(body) == 10:
        if chunk == b"VP8X":
            return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
        if chunk == b"VP8L" and body[0] == 0x2F:
            bits = int.from_bytes(body[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
            return (
                int.from_bytes(body[6:8], "little") & 0x3FFF,
                int.from_bytes(body[8:10], "little") & 0x3FFF,
            )
    raise MediaRefused("the WEBP is broken or cut off")
