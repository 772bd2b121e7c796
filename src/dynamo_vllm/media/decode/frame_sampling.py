"""Chooses the frames of a video for a model: the methods of vLLM 0.30, under vLLM's names.

vLLM chooses one by the model's video processor; `tests/contract/test_media.py` compares each with vLLM's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dynamo_vllm.errors import MediaRefused

Choose = Callable[[int, float], list[int]]
"""From the number of frames and their rate to the indices of the selected ones."""

_FRAMES = 32
_FPS, _LEAST, _MOST, _PATCH = 2, 4, 768, 2


def uniform(total: int, _rate: float) -> list[int]:
    """A fixed number of frames at equal distances."""
    if total <= _FRAMES:
        return list(range(total))
    return [int(index) for index in np.linspace(0, total - 1, _FRAMES, dtype=int)]


def qwen2_vl(total: int, rate: float) -> list[int]:
    """Two frames per second, an even number of them."""
    _need_rate(rate)
    most = min(_MOST, total) // _PATCH * _PATCH
    wanted = min(max(total / rate * _FPS, _LEAST), most, total)
    count = math.floor(wanted / _PATCH) * _PATCH
    if count == 0:
        raise MediaRefused(f"a video of {total} frame is too short for this model; it needs at least two")
    # In single precision, as in the model's own processor, so the last index may be `total`. Its sums depend
    # on the width of the CPU's vectors: on long videos an index may be off by one, unless vLLM itself chooses
    # (`engine/vllm/parts/video.py`).
    step = total / count
    indices = (np.arange(math.ceil(total / step)) * step).astype(np.float32).astype(int)
    return [int(index) for index in np.minimum(indices, total - 1)]


def qwen3_vl(total: int, rate: float) -> list[int]:
    """Two frames per second, rounded to the nearest."""
    _need_rate(rate)
    count = min(max(int(total / rate * _FPS), _LEAST), _MOST, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def _need_rate(rate: float) -> None:
    if not rate > 0:
        raise MediaRefused("the video has no frame rate, which this model needs")


@dataclass(frozen=True, slots=True)
class Sampler:
    name: str
    choose: Choose


def _refuse(_total: int, _rate: float) -> list[int]:
    raise MediaRefused("videos are not supported for this model: its frame selection is unknown")


UNKNOWN = Sampler("unknown", _refuse)
"""For a model whose frame selection in vLLM we do not know."""
# For a worker without vLLM; one with it asks vLLM itself.
SAMPLERS = {
    name: Sampler(name, choose)
    for name, choose in (("opencv", uniform), ("qwen2_vl", qwen2_vl), ("qwen3_vl", qwen3_vl))
}
