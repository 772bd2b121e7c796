"""Adds a worker extension for tests that appends a byte to the file VISION_RUNS per vision encoder run."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from dynamo_vllm.engine.patches.cpu_worker import CpuWorkerExtension

_ENCODERS = (
    ("clip", "CLIPVisionModel"),
    ("qwen2_vl", "Qwen2VisionTransformer"),
    ("qwen2_5_vl", "Qwen2_5_VisionTransformer"),
    ("qwen3_vl", "Qwen3_VisionTransformer"),
)


class Counts(CpuWorkerExtension):
    """Is mixed into vLLM's worker; its import starts the counting."""


def _counted(forward: Any) -> Any:
    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ["VISION_RUNS"], "ab") as file:
            file.write(b".")
        return forward(*args, **kwargs)

    return counted


for _module, _name in _ENCODERS:
    _class = getattr(importlib.import_module(f"vllm.model_executor.models.{_module}"), _name)
    _class.forward = _counted(_class.forward)
