"""Which weights of a repository are fetched: those vLLM would read."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.models.hub import Wanted, needed_weights

SHARDS = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
BOTH = ["model.safetensors", "pytorch_model.bin", "tf_model.h5", "config.json"]
MISTRAL = [*SHARDS, "consolidated.safetensors"]


@pytest.mark.parametrize(
    ("names", "indexed", "how", "expected"),
    [
        (BOTH, [], {}, ["model.safetensors"]),
        (BOTH, [], {"load_format": "npcache"}, ["pytorch_model.bin"]),
        (BOTH, [], {"load_format": "pt"}, []),
        (BOTH, [], {"load_format": "dummy"}, []),
        (BOTH, [], {"whole": True}, ["model.safetensors", "pytorch_model.bin"]),
        (["a.bin", "b.pt"], [], {}, ["a.bin"]),
        (["a.bin", "b.pt"], [], {"load_format": "safetensors"}, []),
        (MISTRAL, SHARDS, {}, ["consolidated.safetensors"]),
        (MISTRAL, SHARDS, {"load_format": "hf"}, SHARDS),
        (MISTRAL, SHARDS, {"load_format": "mistral"}, ["consolidated.safetensors"]),
        ([*SHARDS, "fp16.safetensors"], SHARDS, {}, SHARDS),
        ([*SHARDS, "other.safetensors"], ["gone.safetensors"], {}, [*SHARDS, "other.safetensors"]),
        (
            ["m.safetensors", "talker/t.safetensors", "x/y.bin"],
            [],
            {},
            ["m.safetensors", "talker/t.safetensors"],
        ),
        (["m.safetensors", "original/m.safetensors", "onnx/m.onnx"], [], {}, ["m.safetensors"]),
    ],
)
def test_weights_are_those_vllm_reads(
    names: list[str], indexed: list[str], how: dict[str, Any], expected: list[str]
) -> None:
    assert needed_weights(Wanted(model="m", **how), names, indexed) == expected
