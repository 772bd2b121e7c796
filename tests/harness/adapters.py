"""Makes LoRA adapters for a base model folder, as PEFT would save them, and broken ones. No torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "int32": "I32", "uint16": "BF16"}
"""numpy has no bfloat16: its bits are given as uint16."""


def make_adapter(
    folder: Path,
    base_folder: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 1,
    scale: float = 0.5,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
) -> Path:
    """An adapter for every module of the base model whose name ends in one of `targets`.

    Faults: `config` and `tensors` replace entries, None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "base_model_name_or_path": str(base_folder),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        **(config or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    arrays = lora_arrays(weight_shapes(base_folder), rank, seed, scale, targets)
    for name, value in (tensors or {}).items():
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value
    write_safetensors(folder / "adapter_model.safetensors", arrays)
    return folder


def lora_arrays(
    shapes: Mapping[str, Sequence[int]], rank: int, seed: int, scale: float, targets: Sequence[str]
) -> Arrays:
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    arrays: Arrays = {}
    for weight, (rows, columns) in sorted(shapes.items()):
        module = weight.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            arrays[f"base_model.model.{module}.lora_A.weight"] = matrix(rank, columns)
            arrays[f"base_model.model.{module}.lora_B.weight"] = matrix(rows, rank)
    return arrays


def weight_shapes(base_folder: Path) -> dict[str, tuple[int, int]]:
    """The matrices of a base model in one safetensors file."""
    header, _ = read_safetensors(base_folder / "model.safetensors")
    return {name: tuple(entry["shape"]) for name, entry in header.items() if len(entry["shape"]) == 2}


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, raw[8 + length :]


def write_safetensors(path: Path, arrays: Arrays) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": CODES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    write_raw(path, header, b"".join(array.tobytes() for array in arrays.values()))


def write_raw(path: Path, header: Any, data: bytes) -> None:
    """Whatever header beside whatever data."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
