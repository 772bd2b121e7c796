"""Videos, decoded in a process of their own that cannot take the worker with it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import mmap
import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from dynamo_vllm import errors
from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.base import Video

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_vllm.media.base import MediaLimits
    from dynamo_vllm.media.sampling import Sampler
    from dynamo_vllm.media.sniff import Format
    from dynamo_vllm.media.watch import Watch

logger = logging.getLogger(__name__)

_LOOK_MS = 100
# With the paths of this process and without what the environment or .pth files add.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from dynamo_vllm.media.video_child import main; main()"
)


def decode(
    data: bytes, format: Format, sampler: Sampler, limits: MediaLimits, watch: Watch
) -> tuple[Video, int]:
    """The sampled frames, and the bytes they take. Blocks, in a thread."""
    import numpy as np

    if _is_cut_off(data, format):
        raise MediaRefused(f"the {format.name} is cut off")
    with _memory_file("video") as source, _memory_file("frames") as target:
        with open(source, "wb", closefd=False) as file:
            file.write(data)
        order = {"video": source, "bytes": len(data), "frames": target, "limits": _numbers(limits)}
        with _child(order) as child:
            length = _hear(child, watch)
            _say(child, _chosen(sampler, length["total"], length["rate"]))
            read = _hear(child, watch)
        shape = tuple(read["shape"])
        # Private pages: what writes here, against the rule, changes nobody else's.
        memory = mmap.mmap(target, math.prod(shape), access=mmap.ACCESS_COPY)
    frames = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
    return Video(frames, read["metadata"]), frames.nbytes


def _is_cut_off(data: bytes, format: Format) -> bool:
    """Whether the container promises bytes that are not there; a decoder would play what has come."""
    if format.name == "AVI":
        return 8 + int.from_bytes(data[4:8], "little") > len(data)
    at = 0
    while format.name == "MP4" and at + 8 <= len(data):
        size, head = int.from_bytes(data[at : at + 4], "big"), 8
        if size == 1:  # the size proper follows
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        if size == 0:  # to the end
            return False
        at += max(size, head)
    return at > len(data)


@contextlib.contextmanager
def _memory_file(name: str) -> Iterator[int]:
    handle = os.memfd_create(f"media-{name}")
    try:
        yield handle
    finally:
        os.close(handle)


def _numbers(limits: MediaLimits) -> dict[str, float]:
    names = ("max_pixels", "max_video_pixels", "max_frames", "max_seconds", "timeout_seconds")
    return {name: getattr(limits, name) for name in names}


@contextlib.contextmanager
def _child(order: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", "-c", _START, json.dumps(order), json.dumps(sys.path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(order["video"], order["frames"]),
        bufsize=0,
        cwd="/",
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # it has said all, or is not wanted any more


def _chosen(sampler: Sampler, total: int, rate: float) -> list[int]:
    try:
        return sampler.choose(total, rate)
    except (ValueError, ZeroDivisionError):  # vLLM's own ways, of videos without a rate or of one frame
        raise MediaRefused("the video is too short for this model, or does not tell its rate") from None


def _say(child: subprocess.Popen[bytes], what: list[int]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # what it ended with is heard next
        child.stdin.write(json.dumps(what).encode() + b"\n")


def _hear(child: subprocess.Popen[bytes], watch: Watch) -> dict[str, Any]:
    """The next line, unless the process ends before it or the time is over."""
    assert child.stdout is not None
    ready = select.poll()  # unlike select.select, for any number of open files
    ready.register(child.stdout, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        watch.check()
        if not ready.poll(_LOOK_MS):
            continue
        came = os.read(child.stdout.fileno(), 1 << 16)
        if not came:
            logger.warning("media: the decoder of a video ended with code %d", child.wait())
            raise MediaRefused("the video is broken: its decoder gave up")
        line += came
    told: dict[str, Any] = json.loads(line)
    if "refused" in told:
        raise getattr(errors, told["refused"])(told["why"])
    return told
