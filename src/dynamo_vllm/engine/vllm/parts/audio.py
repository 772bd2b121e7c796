"""Refuses audio that a model does not support, before vLLM's processor gets it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

# This model uses one window of audio. Longer audio crashes the engine of vLLM 0.30 ("input_features dim[2]
# expected 3000, got 3100"); 0.31 truncates it silently. Subclasses (Qwen2.5-Omni) use several windows.
_ONE_WINDOW = "Qwen2AudioProcessingInfo"


def refuse(info: Any, items: Sequence[tuple[Any, int]]) -> None:
    """Raises InvalidRequest for unsupported audio.

    `items` have samples and their rate; `info` is the processing info of the model's processor.
    """
    longest = longest_seconds(info)
    resampler = info.data_parser.audio_resampler
    for samples, rate in items:
        if longest is not None and len(samples) > longest * rate:
            raise InvalidRequest(
                f"an audio item lasts {len(samples) / rate:.1f} s; this model accepts up to {longest:g} s",
                parameter="messages",
            )
        if resampler.target_sr not in (None, rate) and not _can_resample(resampler.method):
            raise InvalidRequest(
                f"an audio item has {rate} Hz; this worker accepts only {resampler.target_sr:g} Hz. For "
                f"other rates its operator can run: pip install {_module(resampler.method)}",
                parameter="messages",
            )


def longest_seconds(info: Any) -> float | None:
    """Returns the longest audio that the model accepts; None if there is no limit."""
    if type(info).__name__ != _ONE_WINDOW:
        return None
    return float(info.get_feature_extractor().chunk_length)


def _can_resample(method: str) -> bool:
    # vLLM 0.30 checks only when it resamples, and then fails with an ImportError.
    return find_spec(_module(method)) is not None


def _module(method: str) -> str:
    return "av" if method == "pyav" else method
