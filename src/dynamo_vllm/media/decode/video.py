"""Decodes videos in a child process, with the frames that the model needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.base import Video
from dynamo_vllm.media.decode import decode_process

if TYPE_CHECKING:
    from dynamo_vllm.media.base import MediaLimits
    from dynamo_vllm.media.cancellation import Deadline
    from dynamo_vllm.media.decode.frame_sampling import Sampler
    from dynamo_vllm.media.decode.sniff import MediaFormat


def decode(
    data: bytes, format: MediaFormat, sampler: Sampler, limits: MediaLimits, watch: Deadline
) -> tuple[Video, int]:
    """Return the sampled frames and the bytes they take. Blocks; run it in a thread."""
    if _is_cut_off(data, format):
        raise MediaRefused(f"the {format.name} is cut off")
    with decode_process.decoder(data, format, limits, watch) as decoder:
        length = decoder.receive()
        decoder.send(_choose_frames(sampler, length["total"], length["rate"]))
        read = decoder.receive()
        shape = tuple(read["shape"])
        memory = decoder.decoded(math.prod(shape))
    frames = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
    return Video(frames, read["metadata"]), frames.nbytes


def _is_cut_off(data: bytes, format: MediaFormat) -> bool:
    """Return whether the container declares bytes that are missing; a decoder would play what has arrived."""
    if format.name == "AVI":
        return 8 + int.from_bytes(data[4:8], "little") > len(data)
    at = 0
    while format.name == "MP4" and at + 8 <= len(data):
        size, head = int.from_bytes(data[at : at + 4], "big"), 8
        if size == 1:  # the real size follows
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        if size == 0:  # to the end
            return False
        at += max(size, head)
    return at > len(data)


def _choose_frames(sampler: Sampler, total: int, rate: float) -> list[int]:
    try:
        return sampler.choose(total, rate)
    except (ValueError, ZeroDivisionError):  # vLLM's own methods for videos without a rate or with one frame
        raise MediaRefused("the video is too short for this model, or has no frame rate") from None
