"""Asks vLLM which frames of a video it would take for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# What vLLM 0.30's loaders ask for when nothing is configured. The others pad frames or shift times.
_KNOWN = {"opencv": (32, -1), "qwen2_vl": (-1, 2), "qwen3_vl": (-1, 2)}
_MAX_SECONDS = 300  # of vLLM's signature; none of these looks at it


def frame_chooser(video_processor: str | None) -> tuple[str, Callable[[int, float], list[int]]] | None:
    """vLLM's name for the way, and the way: (frames, frames a second) → indices. None: not known to us.

    `video_processor` is the name of the class of the model's video processor, if it has one.
    """
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, get_video_loader_backend_for_processor
    from vllm.multimodal.video_decoders import VideoSourceMetadata, VideoTargetMetadata

    name = get_video_loader_backend_for_processor(video_processor) or "opencv"
    if name not in _KNOWN:
        return None
    frames, rate = _KNOWN[name]
    loader = VIDEO_LOADER_REGISTRY.load(name)
    target = VideoTargetMetadata(frames, rate, _MAX_SECONDS)

    def choose(total: int, fps: float) -> list[int]:
        source = VideoSourceMetadata(total, fps, total / fps if fps > 0 else 0)
        indices: list[int] = loader.compute_frames_index_to_sample(source, target)
        return indices

    return name, choose
