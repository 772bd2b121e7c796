"""The process that decodes one file: its bytes in one memory file, the result in another, JSON lines between.

For a video it reports the number of frames and receives the wanted ones; at the end it reports what it has
written.

Native decoders have bugs, and a file made to trigger one must not end the worker. Here it ends this process,
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
from dynamo_vllm.media.base import MAX_AUDIO_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dynamo_vllm.media.base import MediaLimits

OWN_BYTES = 3 << 30
"""Address space for Python, its libraries and a decoder's own frames, besides the file and the result."""


def main() -> None:
    order: dict[str, object] = json.loads(sys.argv[1])
    _confine(order)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries does not spoil the answer
    _send(out, _decode(order, out))
    os._exit(0)  # destructors have nothing to do but crash


def _send(out: TextIO, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def _confine(order: dict[str, Any]) -> None:
    """Limits that hold whatever the decoder does."""
    limits = order["limits"]
    result = limits["max_speech_bytes"] or MAX_AUDIO_BYTES
    if order["kind"] == "video":
        result = limits["max_video_pixels"] * 3
    signal.alarm(math.ceil(limits["timeout_seconds"]) + 1)
    resource.setrlimit(resource.RLIMIT_AS, (OWN_BYTES + result + 2 * order["bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (result,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Before these libraries are imported: one thread, no output.
    os.environ.update(
        OPENBLAS_NUM_THREADS="1",
        OPENCV_LOG_LEVEL="SILENT",
        OPENCV_FFMPEG_LOGLEVEL="-8",
        OPENCV_FFMPEG_CAPTURE_OPTIONS="format_whitelist;mov,matroska,avi|protocol_whitelist;none",
    )


def _decode(order: dict[str, Any], out: TextIO) -> dict[str, Any]:
    from dynamo_vllm.media.base import MediaLimits

    data = mmap.mmap(order["source"], order["bytes"], access=mmap.ACCESS_READ)[:]
    limits = MediaLimits(**order["limits"])
    try:
        if order["kind"] == "video":
            return _video(data, limits, order["target"], out)
        return _audio(data, order["format"], limits, order["target"])
    except MediaRefused as exc:
        return {"refused": type(exc).__name__, "why": str(exc)}


def _video(data: bytes, limits: MediaLimits, target: int, out: TextIO) -> dict[str, object]:
    from dynamo_vllm.media.decode import video_frames

    def allocate(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        import numpy as np

        os.ftruncate(target, math.prod(shape))
        return np.frombuffer(mmap.mmap(target, math.prod(shape)), dtype=np.uint8).reshape(shape)

    def choose(total: int, rate: float) -> list[int]:
        _send(out, {"total": total, "rate": rate})
        wanted: list[int] = json.loads(sys.stdin.readline())
        return wanted

    video = video_frames.decode(data, choose, limits, allocate)
    return {"shape": video.frames.shape, "metadata": video.metadata}


def _audio(data: bytes, name: str, limits: MediaLimits, target: int) -> dict[str, object]:
    from dynamo_vllm.media.decode import audio

    with open(target, "wb", closefd=False) as file:
        samples, rate = audio.decode_with_soundfile(data, name, limits, lambda made: file.write(made.data))
    return {"rate": rate, "samples": samples}
