"""Tests that we decode media to the same values as vLLM's own loader."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata

from dynamo_vllm.engine.vllm.parts.video import frame_chooser
from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.base import MediaLimits
from dynamo_vllm.media.cancellation import Deadline
from dynamo_vllm.media.decode import image, sniff, video, video_frames
from dynamo_vllm.media.decode.frame_sampling import SAMPLERS
from harness import media

LIMITS = MediaLimits()


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


PICTURES: dict[str, dict[str, Any]] = {
    "png": {},
    "png-rgba": {"mode": "RGBA"},
    "png-la": {"mode": "LA"},
    "png-l": {"mode": "L"},
    "png-1": {"mode": "1"},
    "png-p": {"mode": "P"},
    "png-p-transparent": {"mode": "P", "transparency": 3},
    "png-rgb-transparent": {"transparency": (10, 20, 30)},
    "png-16-bit": {"mode": "I;16"},
    "png-turned": {"exif": exif(6)},
    "png-broken-exif": {"exif": b"Exif\0\0nonsense"},
    "jpeg": {"format": "JPEG"},
    "jpeg-l": {"format": "JPEG", "mode": "L"},
    "jpeg-cmyk": {"format": "JPEG", "mode": "CMYK"},
    "jpeg-progressive": {"format": "JPEG", "progressive": True},
    **{f"jpeg-turned-{number}": {"format": "JPEG", "exif": exif(number)} for number in range(1, 10)},
    "webp": {"format": "WEBP"},
    "webp-lossless-rgba": {"format": "WEBP", "mode": "RGBA", "lossless": True},
    "webp-animated": {"format": "WEBP", "save_all": True, "append_images": [Image.new("RGB", (12, 8))]},
    "gif": {"format": "GIF", "mode": "P"},
    "gif-transparent": {"format": "GIF", "mode": "P", "transparency": 5},
    "gif-animated": {
        "format": "GIF",
        "mode": "P",
        "save_all": True,
        "append_images": [Image.new("RGB", (12, 8))],
    },
    "bmp": {"format": "BMP"},
}


@pytest.mark.filterwarnings("ignore")  # Pillow's, of the broken EXIF block
@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_the_one_vllm_makes(name: str) -> None:
    saved = dict(PICTURES[name])
    mode = saved.pop("mode", "RGB")
    if mode == "I;16":
        saved.pop("mode", None)
        data = sixteen_bits()
    else:
        data = media.picture(mode=mode, **saved)
    theirs = ImageMediaIO().load_bytes(data).media
    ours, size = image.decode(data, sniff.sniff(data, "image"), LIMITS, Deadline(5))
    assert (ours.mode, ours.size) == (theirs.mode, theirs.size) == ("RGB", ours.size)
    assert ours.tobytes() == theirs.tobytes()
    assert size == ours.width * ours.height * 4
    assert ours.info == {}


def sixteen_bits() -> bytes:
    import io

    buffer = io.BytesIO()
    Image.fromarray(np.arange(96, dtype=np.uint16).reshape(8, 12) * 600).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_takes_the_frames_vllm_takes(name: str) -> None:
    loader = VIDEO_LOADER_REGISTRY.load(name)
    # What vLLM's loaders ask for when nothing is configured.
    target = VideoTargetMetadata(32, -1, 300) if name == "opencv" else VideoTargetMetadata(32, 2, 300)
    for rate in (1.0, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94, 60.0, 120.0):
        for total in [*range(2, 200), 249, 250, 251, 299, 451, 900, 1799, 5000, 12345, 36001]:
            source = VideoSourceMetadata(total, rate, total / rate)
            theirs = loader.compute_frames_index_to_sample(source, target)
            ours = SAMPLERS[name].choose(total, rate)
            # vLLM's sums for Qwen2 depend on the processor: off by one at most, on long videos.
            slack = 1 if name == "qwen2_vl" and total > 500 else 0
            assert np.abs(np.subtract(ours, theirs)).max() <= slack, (total, rate)


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("Qwen2VLVideoProcessor", "qwen2_vl"),
        ("Qwen3VLVideoProcessor", "qwen3_vl"),
        ("LlavaNextVideoProcessor", "opencv"),
        (None, "opencv"),
    ],
)
def test_engine_chooses_as_vllm_does(processor: str | None, name: str) -> None:
    found = frame_chooser(processor)
    assert found is not None and found[0] == name and name in SAMPLERS
    for total, rate in ((50, 10.0), (300, 29.97)):
        assert found[1](total, rate) == SAMPLERS[name].choose(total, rate)


def test_engine_does_not_guess_at_ways_it_does_not_know() -> None:
    assert frame_chooser("Glm4vVideoProcessor") is None


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(
    ("file", "codec", "frames", "rate"),
    [
        ("a.mp4", "mp4v", 50, 10.0),
        ("b.mp4", "mp4v", 20, 29.97),
        ("c.avi", "MJPG", 90, 25.0),
        ("d.webm", "VP80", 40, 24.0),
        ("e.mp4", "mp4v", 3, 10.0),
    ],
)
def test_video_is_the_one_vllm_makes(
    tmp_path: Path, name: str, file: str, codec: str, frames: int, rate: float
) -> None:
    data = media.video(tmp_path, file, codec, frames, rate)
    theirs, metadata = VideoMediaIO(ImageMediaIO(), video_backend=name).load_bytes(data).media
    sniff.sniff(data, "video")
    ours = video_frames.decode(data, SAMPLERS[name].choose, LIMITS, room)
    assert ours.metadata == metadata
    assert np.array_equal(ours.frames, theirs)


def room(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.empty(shape, dtype=np.uint8)


def test_process_of_its_own_changes_nothing(tmp_path: Path) -> None:
    data = media.video(tmp_path)
    theirs, metadata = VideoMediaIO(ImageMediaIO(), video_backend="qwen3_vl").load_bytes(data).media
    ours, size = video.decode(data, sniff.sniff(data, "video"), SAMPLERS["qwen3_vl"], LIMITS, Deadline(30))
    assert ours.metadata == metadata
    assert np.array_equal(ours.frames, theirs)
    assert size == theirs.nbytes


def test_one_frame_is_too_short_for_qwen2(tmp_path: Path) -> None:
    with pytest.raises(MediaRefused, match="too short"):
        video_frames.decode(media.video(tmp_path, frames=1), SAMPLERS["qwen2_vl"].choose, LIMITS, room)


def test_sound_is_the_one_vllm_makes() -> None:
    pytest.importorskip("soundfile")
    from vllm.multimodal.media import AudioMediaIO

    from dynamo_vllm.media.decode import audio

    for width in (1, 2, 3, 4):
        for channels in (1, 2):
            data = media.sound(width=width, channels=channels)
            theirs, rate = AudioMediaIO().load_bytes(data)
            ours, _ = audio.decode(data, sniff.sniff(data, "audio"), LIMITS, Deadline(5))
            assert ours.rate == rate
            assert np.array_equal(ours.samples, theirs), SimpleNamespace(width=width, channels=channels)
