"""The types that the parts of this package and its users share."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from dynamo_vllm.media.held_bytes import MediaMemory

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")

MEGABYTE = 1 << 20
MEGAPIXEL = 1_000_000
MAX_AUDIO_BYTES = 256 << 20
"""All channels, as floats; vLLM has the same limit."""
MAX_CHANNELS = 4
"""Channels of an image: grey, grey with alpha, RGB, RGBA."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image that the frontend decoded: rows of pixels with one byte per channel, in its memory."""

    height: int
    width: int
    channels: int
    address: int
    agent: str
    """How NIXL reaches that memory."""

    @property
    def size(self) -> int:
        return self.height * self.width * self.channels


class PixelSource(Protocol):
    async def read(self, pixels: Pixels) -> bytes:
        """As many as `pixels.size`."""
        ...


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One media part of a request: a http:, https:, data: or file: URL, or pixels decoded by the frontend."""

    kind: Kind
    url: str
    pixels: Pixels | None = None


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames (T, H, W, 3), and the metadata that vLLM's processors need."""

    frames: NDArray[np.uint8]
    metadata: dict[str, Any]
    """total_num_frames, fps, duration, video_backend, frames_indices, do_sample_frames; as vLLM writes it."""


@dataclass(frozen=True, slots=True)
class Audio:
    """One channel, at its original sample rate."""

    samples: NDArray[np.float32]
    rate: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """Loaded media. All requests with the same content share it: it must not be changed."""

    kind: Kind
    data: Image | Video | Audio
    """An image is RGB."""
    key: str
    """SHA-256 of kind, encoded bytes and how they were decoded: the same content has the same key."""
    size: int
    """Bytes it takes when decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The limits of one request. Media above a limit are refused, never truncated."""

    max_bytes: int = 64 * MEGABYTE
    """Encoded bytes of one item."""
    max_pixels: int = 64 * MEGAPIXEL
    """Pixels of an image, or of one frame of a video."""
    max_video_pixels: int = 512 * MEGAPIXEL
    """Pixels of all sampled frames of a video together; a pixel takes three bytes."""
    max_frames: int = 768
    """Frames sampled from one video."""
    max_seconds: float = 600.0
    """Duration of a video or audio."""
    max_speech_bytes: int | None = None
    """Samples of speech, one channel as floats; None counts all channels up to MAX_AUDIO_BYTES."""
    timeout_seconds: float = 20.0
    """From the first byte to the decoded item, without the time in queues."""
    queue_seconds: float = 60.0
    """Time in queues for one item. Delays by others are not this client's fault, hence 503."""
    redirects: int = 3
    per_request: Mapping[Kind, int] = field(
        default_factory=lambda: MappingProxyType({"image": 16, "video": 2, "audio": 4})
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCapacity:
    """How much of a worker the loading of media may use."""

    at_once: int = 64
    """Items fetched at a time."""
    threads: int = 4
    """Threads that decode."""
    cache_bytes: int = 512 * MEGABYTE
    """Bytes of the cache of decoded media."""
    memory_bytes: int = 4096 * MEGABYTE
    """Bytes of media that requests hold until the engine has started them; a single request may hold more."""


class MediaLoader(Protocol):
    """Raises MediaRefused (400), MediaTooLarge (413), MediaTypeUnknown (415), Overloaded (503)."""

    @property
    def memory(self) -> MediaMemory:
        """Count the bytes of the items while their requests hold them."""
        ...

    async def load(self, ref: MediaRef) -> MediaItem: ...

    async def load_all(self, refs: Sequence[MediaRef]) -> list[MediaItem]:
        """Return the items in order. Counts are checked before anything is fetched; the first error ends the
        others."""
        ...

    async def aclose(self) -> None: ...
