"""Refuses sounds that a model cannot take, before vLLM's processor sees them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

# This model takes one window of audio. With a longer one vLLM 0.30 ends the engine ("input_features dim[2]
# expected 3000, got 3100"), and 0.31 cuts it without a word. Subclasses (Qwen2.5-Omni) take several windows.
_ONE_WINDOW = "Qwen2AudioProcessingInfo"


def refuse(info: Any, sounds: Sequence[tuple[Any, int]]) -> None:
    """`sounds` are samples and their rate; `info` is that of the model's processor."""
    longest = longest_seconds(info)
    resampler = info.data_parser.audio_resampler
    for samples, rate in sounds:
        if longest is not None and len(samples) > longest * rate:
            raise InvalidRequest(
                f"a sound lasts {len(samples) / rate:.1f} s; this model hears up to {longest:g} s",
                parameter="messages",
            )
        if resampler.target_sr not in (None, rate) and not _can_resample(resampler.method):
            raise InvalidRequest(
                f"a sound has {rate} Hz; this worker takes {resampler.target_sr:g} Hz only. For others its "
                f"operator may run: pip install {_module(resampler.method)}",
                parameter="messages",
            )


def longest_seconds(info: Any) -> float | None:
    """None where the model takes a sound of any length."""
    if type(info).__name__ != _ONE_WINDOW:
        return None
    return float(info.get_feature_extractor().chunk_length)


def _can_resample(method: str) -> bool:
    # vLLM 0.30 looks only when it is about to, and then fails with an ImportError.
    return find_spec(_module(method)) is not None


def _module(method: str) -> str:
    return "av" if method == "pyav" else method
