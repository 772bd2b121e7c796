"""A worker extension: every run of the vision encoder adds its time to the file of `timed`."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from timed import ENCODE, note
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer


class Timed:
    """vLLM mixes this into its worker; importing it is what times."""


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(forward: Any) -> Any:
    @functools.wraps(forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        finish()  # what came before is not the encoder's
        began = time.perf_counter()
        made = forward(*args, **kwargs)
        finish()
        note(ENCODE, time.perf_counter() - began)
        return made

    return timed


Qwen2_5_VisionTransformer.forward = _timed(Qwen2_5_VisionTransformer.forward)
