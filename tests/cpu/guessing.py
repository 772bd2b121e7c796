"""Makes models that guess for the tiny one: a draft model, heads of EAGLE, and a model with its own (MTP).

They are made of the model's own weights, so that some of their guesses are right and most are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Weights = dict[str, NDArray[np.float32]]
_NORMED = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
"""What a layer of Qwen3 has and others have not."""


def make(kind: str, folder: Path, model: Path) -> Path:
    """A folder like the model's with other weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    more, weights = MAKERS[kind](load_file(model / "model.safetensors"), config)
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _draft_model(weights: Weights, config: dict[str, Any]) -> tuple[dict[str, Any], Weights]:
    """The model itself, a tenth of it noise."""
    chance = np.random.default_rng(1)

    def noisy(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        noise = chance.standard_normal(weight.shape, dtype=np.float32)
        return weight + noise * np.float32(weight.std() * 0.1)

    return {}, {name: noisy(found) if found.ndim == 2 else found for name, found in weights.items()}


def _eagle(weights: Weights, config: dict[str, Any]) -> tuple[dict[str, Any], Weights]:
    """The model's first layer over the last token; what the model itself made of it is not heeded."""
    width = config["hidden_size"]
    made = {"fc.weight": np.concatenate([_one(width), _none(width)], axis=1)}
    layer = _first_layer(weights)
    del layer["input_layernorm.weight"]
    return _llama("LlamaForCausalLM"), made | {f"layers.0.{name}": found for name, found in layer.items()}


def _eagle3(weights: Weights, config: dict[str, Any]) -> tuple[dict[str, Any], Weights]:
    """The same over what the model's last layers made."""
    width = config["hidden_size"]
    made = {
        "fc.weight": np.concatenate([_none(width), _none(width), _one(width)], axis=1),
        "norm.weight": np.ones(width, dtype=np.float32),
        "lm_head.weight": weights["lm_head.weight"],
        "midlayer.hidden_norm.weight": np.ones(width, dtype=np.float32),
    }
    for name, found in _first_layer(weights).items():
        reads_both = name.startswith(("self_attn.q_", "self_attn.k_", "self_attn.v_"))
        made[f"midlayer.{name}"] = (
            np.concatenate([found, np.zeros_like(found)], axis=1) if reads_both else found
        )
    told = {"draft_vocab_size": config["vocab_size"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    return {**_llama("LlamaForCausalLMEagle3"), **told}, made


def _mtp(weights: Weights, config: dict[str, Any]) -> tuple[dict[str, Any], Weights]:
    """A MiMo: the model with another attention, and one more layer that guesses."""
    width, guessing = config["hidden_size"], "model.mtp_layers.0."
    made = {name: found for name, found in weights.items() if not name.endswith(_NORMED)}
    made |= {guessing + name: found.copy() for name, found in _first_layer(weights).items()}
    made |= {
        f"{guessing}{name}_layernorm.weight": np.ones(width, np.float32)
        for name in ("token", "hidden", "final")
    }
    made[f"{guessing}input_proj.weight"] = np.concatenate([_none(width), _one(width) / 2], axis=1)
    for layer in (guessing, *(f"model.layers.{at}." for at in range(config["num_hidden_layers"]))):
        for name in "qkv":
            rows = made[f"{layer}self_attn.{name}_proj.weight"].shape[0]
            made[f"{layer}self_attn.{name}_proj.bias"] = np.zeros(rows, np.float32)
    told = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    return told, made


MAKERS: dict[str, Callable[[Weights, dict[str, Any]], tuple[dict[str, Any], Weights]]] = {
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "mtp": _mtp,
}


def _llama(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1}


def _first_layer(weights: Weights) -> Weights:
    start = "model.layers.0."
    found = {name.removeprefix(start): each for name, each in weights.items() if name.startswith(start)}
    return {name: each for name, each in found.items() if name not in _NORMED}


def _one(width: int) -> NDArray[np.float32]:
    return np.eye(width, dtype=np.float32)


def _none(width: int) -> NDArray[np.float32]:
    return np.zeros((width, width), dtype=np.float32)
