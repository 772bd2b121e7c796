"""Reads videos with OpenCV, with the frames and metadata of vLLM's own loader.

Runs in a child process (`video.py`).
"""

from __future__ import annotations

import math
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

from dynamo_vllm.errors import MediaRefused, MediaTooLarge, MediaTypeUnknown
from dynamo_vllm.media.base import MEGAPIXEL, Video

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import cv2
    import numpy as np
    from numpy.typing import NDArray

    from dynamo_vllm.media.base import MediaLimits
    from dynamo_vllm.media.decode.frame_sampling import Choose

    Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]

MAX_RATE = 240
"""Frames per second; a header that claims more of them than this for the longest video is wrong."""


def decode(data: bytes, choose: Choose, limits: MediaLimits, allocate: Allocate) -> Video:
    """Return the selected frames, in memory that `allocate` allocates for their shape."""
    capture = _open(data)
    width, height = _frame_size(capture, limits)
    total, rate = _length(capture, limits)
    wanted = set(choose(total, rate))
    _check_sample(len(wanted), width * height, limits)
    frames = allocate((len(wanted), height, width, 3))
    read = _read(capture, wanted, frames)
    # The last one may be missing: some headers count one too many, and vLLM continues without it.
    if len(read) < max(1, len(wanted) - 1):
        raise MediaRefused(f"the video is broken or cut off: {len(read)} of {len(wanted)} frames can be read")
    metadata = {
        "total_num_frames": total,
        "fps": rate,
        "duration": total / rate if rate > 0 else 0,
        "video_backend": "opencv",
        "frames_indices": read,
        "do_sample_frames": len(read) == total,
    }
    return Video(frames[: len(read)], metadata)


def _open(data: bytes) -> cv2.VideoCapture:
    """Open the video. Only the end of the process closes it: release() of a capture that reads from memory
    crashes (OpenCV 5.0)."""
    try:
        import cv2
    except ImportError:
        raise MediaTypeUnknown(
            "this worker has no decoder for videos; have its operator run: pip install opencv-python-headless"
        ) from None
    capture = cv2.VideoCapture(cast("cv2.IStreamReader", BytesIO(data)), _backend(), [])
    if not capture.isOpened():
        raise MediaRefused("the video is broken, or its codec is not supported")
    return capture


def _backend() -> int:
    """Return the first backend of OpenCV that reads from memory, the one vLLM uses."""
    import cv2
    from cv2 import videoio_registry as registry

    for backend in registry.getStreamBufferedBackends():
        if not registry.hasBackend(backend):
            continue
        if registry.isBackendBuiltIn(backend):
            return int(backend)
        _, abi, api = registry.getStreamBufferedBackendPluginVersion(backend)
        if (abi, api) >= (1, 2):
            return int(backend)
    return int(cv2.CAP_ANY)


def _frame_size(capture: cv2.VideoCapture, limits: MediaLimits) -> tuple[int, int]:
    import cv2

    width, height = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)), int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    if width <= 0 or height <= 0:
        raise MediaRefused("the video has no frames")
    if width * height > limits.max_pixels:
        raise MediaTooLarge(
            f"the video has {width}x{height} pixels per frame; the limit is "
            f"{limits.max_pixels / MEGAPIXEL:g} million"
        )
    return width, height


def _length(capture: cv2.VideoCapture, limits: MediaLimits) -> tuple[int, float]:
    """Return the number of frames and the frames per second."""
    import cv2

    rate = capture.get(cv2.CAP_PROP_FPS)
    total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    if total <= 0 or not math.isfinite(rate):
        raise MediaRefused("the video has no frame count")
    if total > limits.max_seconds * (rate if 0 < rate <= MAX_RATE else MAX_RATE):
        raise MediaTooLarge(f"the video is longer than {limits.max_seconds:g} s")
    # As vLLM 0.30: an edit list may hide the first frames, and the header counts them. The position after a
    # seek to the end is right; one frame more or less is not corrected.
    if capture.set(cv2.CAP_PROP_POS_AVI_RATIO, 1.0):
        visible = int(capture.get(cv2.CAP_PROP_POS_FRAMES))
        is_end = not capture.grab()
        capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
        if is_end and 0 < visible < total - 1:
            total = visible
    return total, rate


def _check_sample(count: int, frame_pixels: int, limits: MediaLimits) -> None:
    if count > limits.max_frames:
        raise MediaTooLarge(
            f"{count} frames would be selected from the video; the limit is {limits.max_frames}"
        )
    if count * frame_pixels > limits.max_video_pixels:
        raise MediaTooLarge(
            f"the {count} frames selected from the video have {count * frame_pixels / MEGAPIXEL:.0f} million "
            f"pixels; the limit is {limits.max_video_pixels / MEGAPIXEL:g} million"
        )


def _read(capture: cv2.VideoCapture, wanted: set[int], frames: NDArray[np.uint8]) -> list[int]:
    """Fill in the wanted frames that can be read and return their indices. Those between are decoded too."""
    import cv2

    read: list[int] = []
    for index in range(max(wanted) + 1):
        if not capture.grab() or index not in wanted:
            continue
        is_read, frame = capture.retrieve()
        if not is_read:
            continue
        _check_shape(frame, frames.shape[1:])
        cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=frames[len(read)])
        read.append(index)
    return read


def _check_shape(frame: Any, shape: Sequence[int]) -> None:
    if frame is None or frame.shape != shape:
        raise MediaRefused("the frames of the video are of different sizes")
