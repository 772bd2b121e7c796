"""Chooses the frames of a video that vLLM would sample for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# The defaults (frames, frames per second) of vLLM 0.30's loaders. Other loaders pad frames or shift times.
_KNOWN = {"opencv": (32, -1), "qwen2_vl": (-1, 2), "qwen3_vl": (-1, 2)}
_MAX_SECONDS = 300  # vLLM's function needs it; none of these loaders uses it


def frame_chooser(video_processor: str | None) -> tuple[str, Callable[[int, float], list[int]]] | None:
    """Returns vLLM's name of the sampling method, and its function: (frames, frames per second) → indices.

    `video_processor` is the class name of the model's video processor, if it has one. Returns None for a
    method that we do not know.
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
