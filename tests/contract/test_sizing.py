"""Compares our memory arithmetic with transformers' models on the meta device, and vLLM's defaults."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from tiny_models.vision import FAMILIES, make_tiny_vision_model
from vllm.config.cache import CacheConfig
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from dynamo_vllm.models.tiny import make_tiny_model
from dynamo_vllm.sizing import families, memory

TESTS = Path(__file__).parents[1]
CONFIGS = [
    *sorted((TESTS / "unit" / "sizing" / "models").glob("*.json")),
    *sorted((TESTS.parent / "deploy" / "recipes").glob("*/*/config.json")),
]
NO_FACTS = ("quantization_config", "torch_dtype")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_parameters_are_those_of_transformers(path: Path) -> None:
    written: dict[str, Any] = json.loads(path.read_text())
    facts = {name: value for name, value in written.items() if name not in NO_FACTS}
    config = transformers.AutoConfig.for_model(**facts)
    auto = "AutoModelForImageTextToText" if "vision_config" in facts else "AutoModelForCausalLM"
    named = (written.get("architectures") or [""])[0]
    if named.endswith("ForSequenceClassification"):
        auto = "AutoModelForSequenceClassification"
    elif named.startswith("Whisper"):
        auto = "AutoModelForSpeechSeq2Seq"
    with torch.device("meta"):
        made = getattr(transformers, auto).from_config(config)
    there = sum(parameter.numel() for parameter in made.parameters())
    # It is in the files and in vLLM a parameter, here a buffer.
    there += sum(buffer.numel() for name, buffer in made.named_buffers() if "correction_bias" in name)
    assert families.read(written, path.name).total == there


@pytest.mark.parametrize("family", ["text", *FAMILIES])
def test_tiny_models_have_as_many_parameters_as_their_files(family: str, tmp_path: Path) -> None:
    folder = (
        make_tiny_model(tmp_path / "m")
        if family == "text"
        else make_tiny_vision_model(tmp_path / "m", family)
    )
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert families.read(json.loads((folder / "config.json").read_text()), family).total == stored


def read(name: str) -> Any:
    return families.read(json.loads(next(path for path in CONFIGS if name in str(path)).read_text()), name)


def test_pages_of_heads_are_vllms() -> None:
    layer = read("llama-3.1-8b").layers[0]
    for tp in (1, 2, 8, 16):
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=max(1, 8 // tp), head_size=128, dtype=torch.bfloat16
        )
        assert spec.page_size_bytes == 16 * memory.token_bytes([layer], 2, tp)


def test_pages_of_latents_are_vllms() -> None:
    layer = read("deepseek-r1").layers[0]
    for dtype, size in ((torch.bfloat16, 2), (torch.uint8, 1)):
        spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=dtype)
        assert spec.page_size_bytes == 64 * memory.token_bytes([layer], size)


def test_blocks_of_windows_are_vllms() -> None:
    layer = read("gpt-oss/20b").layers[0]
    spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16, sliding_window=128
    )
    for tokens in (100, 5000, 131072):
        blocks = min(spec.max_admission_blocks_per_request(2 * 8192, tokens), math.ceil(tokens / 16))
        assert blocks * spec.page_size_bytes == memory.request_bytes([layer], 2, 1, tokens, 2 * 8192)


def test_the_part_of_a_gpu_is_vllms() -> None:
    assert CacheConfig(block_size=16).gpu_memory_utilization == memory.UTILISATION


@pytest.mark.parametrize(("layers", "count"), [(61, 2), (61, 4), (61, 8), (36, 8), (94, 8), (80, 3)])
def test_stages_are_vllms(layers: int, count: int) -> None:
    spans = [get_pp_indices(layers, rank, count) for rank in range(count)]
    assert memory.stages(layers, count) == [end - start for start, end in spans]
