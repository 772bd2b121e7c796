"""The process that decodes one video: bytes in one memory file, frames in another, lines of JSON between.

It tells how many frames there are, hears which are wanted, and tells what it has read.

Native decoders have faults, and a video made to find one must not end the worker. Here it ends this process,
which has little memory, little time and nothing else to lose.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, TextIO

from dynamo_vllm.errors import MediaRefused

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OWN_BYTES = 3 << 30
"""Address space for Python, OpenCV and the decoder's own frames, beside the video and what is taken of it."""


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    _confine(order)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do not spoil the answer
    _tell(out, _decode(order, out))
    os._exit(0)  # destructors have nothing to do but crash


def _tell(out: TextIO, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def _confine(order: dict[str, Any]) -> None:
    """Limits that hold whatever the decoder does."""
    limits = order["limits"]
    frames = limits["max_video_pixels"] * 3
    signal.alarm(math.ceil(limits["timeout_seconds"]) + 1)
    resource.setrlimit(resource.RLIMIT_AS, (OWN_BYTES + frames + 2 * order["bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (frames,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Before these libraries are imported: one thread of arithmetic, no talk.
    os.environ.update(
        OPENBLAS_NUM_THREADS="1",
        OPENCV_LOG_LEVEL="SILENT",
        OPENCV_FFMPEG_LOGLEVEL="-8",
        OPENCV_FFMPEG_CAPTURE_OPTIONS="format_whitelist;mov,matroska,avi|protocol_whitelist;none",
    )


def _decode(order: dict[str, Any], out: TextIO) -> dict[str, Any]:
    from dynamo_vllm.media import video_frames
    from dynamo_vllm.media.base import MediaLimits

    data = mmap.mmap(order["video"], order["bytes"], access=mmap.ACCESS_READ)

    def room(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        import numpy as np

        os.ftruncate(order["frames"], math.prod(shape))
        return np.frombuffer(mmap.mmap(order["frames"], math.prod(shape)), dtype=np.uint8).reshape(shape)

    def choose(total: int, rate: float) -> list[int]:
        _tell(out, {"total": total, "rate": rate})
        wanted: list[int] = json.loads(sys.stdin.readline())
        return wanted

    try:
        video = video_frames.decode(data[:], choose, MediaLimits(**order["limits"]), room)
    except MediaRefused as exc:
        return {"refused": type(exc).__name__, "why": str(exc)}
    return {"shape": video.frames.shape, "metadata": video.metadata}
