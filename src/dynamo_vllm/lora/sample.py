"""Generates a small adapter that changes nothing, to warm up an engine before any is loaded."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from dynamo_vllm.errors import AdapterRefused
from dynamo_vllm.lora.base import CONFIG, WEIGHTS
from dynamo_vllm.lora.base_model import read_weights
from dynamo_vllm.lora.tensors import BrokenFile

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8
# Modules of the language model's first layer, as most model families name them.
_MODULE = re.compile(
    r"((?:model\.|language_model\.){1,2}layers\.0\.self_attn\.(q_proj|v_proj|qkv_proj))\.weight"
)


def write(folder: Path, base: Path, max_rank: int) -> Path:
    """Write zeros for some modules of the base model; raises AdapterRefused if none of them is known."""
    rank = min(RANK, max_rank)
    try:
        weights = read_weights(base)
    except (OSError, ValueError, BrokenFile) as exc:
        raise AdapterRefused(f"no sample can be made for {base}: {exc}") from exc
    tensors: dict[str, list[int]] = {}
    targets = set()
    for name, weight in weights.items():
        if weight is None or len(weight.shape) != 2 or (found := _MODULE.fullmatch(name)) is None:
            continue
        targets.add(found[2])
        tensors[f"base_model.model.{found[1]}.lora_A.weight"] = [rank, weight.shape[1]]
        tensors[f"base_model.model.{found[1]}.lora_B.weight"] = [weight.shape[0], rank]
    if not tensors:
        raise AdapterRefused(f"no sample can be made for {base}: it has no q_proj and v_proj in safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets)}
    (folder / CONFIG).write_text(json.dumps({**settings, "bias": "none", "task_type": "CAUSAL_LM"}))
    (folder / WEIGHTS).write_bytes(_safetensors(tensors))
    return folder


def _safetensors(shapes: dict[str, list[int]]) -> bytes:
    """Write tensors of zeros, in bfloat16."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(end)
