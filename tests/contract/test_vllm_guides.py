"""Guides as vLLM checks and compiles them, judged with the real compilers in processes that can be killed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.engine import vllm_convert, vllm_guides, vllm_start
from dynamo_vllm.engine.guide_judge import Guides, Limits
from dynamo_vllm.engine.guide_processes import Source
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Guide, SamplingSpec
from dynamo_vllm.models.tiny import make_tiny_model

LIMITS = Limits(seconds=2.0, memory_bytes=512 << 20)


def some_of(k: int) -> dict[str, Any]:
    """A schema whose grammar grows with the third power of `k`."""
    properties = {f"p{i}": {"type": "integer"} for i in range(k)}
    return {"type": "object", "properties": properties, "minProperties": k // 4, "maxProperties": k // 2}
