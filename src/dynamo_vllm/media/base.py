"""What the parts of this package and its users hand each other."""

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
MAX_SOUND_BYTES = 256 << 20
"""All channels, as floats; vLLM has the same limit."""
MAX_CHANNELS = 4
"""Of a picture: grey, grey with alpha, RGB, RGBA."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """A picture that the frontend decoded: rows of pixels of one byte a channel, in its memory."""

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
    """One part of a request that names media: http:, https:, data: or file:, or pixels decoded elsewhere."""

    kind: Kind
    url: str
    pixels: Pixels | None = None


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames (T, H, W, 3), and what vLLM's processors want to know about them."""

    frames: NDArray[np.uint8]
    metadata: dict[str, Any]
    """total_num_frames, fps, duration, video_backend, frames_indices, do_sample_frames; as vLLM writes it."""


@dataclass(frozen=True, slots=True)
class Audio:
    """One channel, at the rate it was recorded with."""

    samples: NDArray[np.float32]
    rate: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """Loaded media. Shared by all requests that name the same content: nobody may change it."""

    kind: Kind
    data: Image | Video | Audio
    """A picture is RGB."""
    key: str
    """SHA-256 of kind, encoded bytes and how they were decoded: the same content has the same key."""
    size: int
    """Bytes it takes decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """How much one request may make us load. What is above is refused, never cut."""

    max_bytes: int = 64 * MEGABYTE
    """Encoded, of one item."""
    max_pixels: int = 64 * MEGAPIXEL
    """Of a picture, or of one frame of a video."""
    max_video_pixels: int = 512 * MEGAPIXEL
    """Of all sampled frames of a video together; a pixel takes three bytes."""
    max_frames: int = 768
    """Sampled from one video."""
    max_seconds: float = 600.0
    """Duration of a video or sound."""
    timeout_seconds: float = 20.0
    """From the first byte asked for to the decoded item, without waiting for a turn in between."""
    queue_seconds: float = 60.0
    """That one item may wait for its turns. Whoever else is slow, it is not this client's fault: 503."""
    redirects: int = 3
    per_request: Mapping[Kind, int] = field(
        default_factory=lambda: MappingProxyType({"image": 16, "video": 2, "audio": 4})
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of a worker the loading of media may take."""

    at_once: int = 64
    """Items that are fetched."""
    threads: int = 4
    """That decode."""
    cache_bytes: int = 512 * MEGABYTE
    """Of decoded media that are kept for later requests."""
    memory_bytes: int = 4096 * MEGABYTE
    """Of media that requests hold until the engine has begun with them; a request alone may hold more."""


class MediaLoader(Protocol):
    """Raises MediaRefused (400), MediaTooLarge (413), MediaTypeUnknown (415), Overloaded (503)."""

    @property
    def memory(self) -> MediaMemory:
        """What the items take, as long as their requests hold them."""
        ...

    async def load(self, ref: MediaRef) -> MediaItem: ...

    async def load_all(self, refs: Sequence[MediaRef]) -> list[MediaItem]:
        """In their order. Counts are checked before anything is fetched; the first error ends the others."""
        ...

    async def aclose(self) -> None: ...
