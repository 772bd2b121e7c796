"""Imports vLLM once, and ignores the warnings of its imports."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm
    import vllm.v1.metrics.loggers  # noqa: F401
