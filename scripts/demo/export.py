"""Writes model folders and adapter folders as vLLM, transformers and PEFT read them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from demo.model import Qwen3, Shape
from demo.template import TEMPLATE
from demo.tokenizer import END_OF_TEXT, TURN_END

HALF = torch.bfloat16


def save_model(model: Qwen3, tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ids = {
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    write(folder / "config.json", _config(model.shape) | ids)
    # Nearly greedy unless a request says otherwise: a wrong digit in a sum is not creativity.
    write(folder / "generation_config.json", ids | {"do_sample": True, "temperature": 0.1})
    write(folder / "tokenizer_config.json", _tokenizer_config(model.shape))
    (folder / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    tokenizer.save(str(folder / "tokenizer.json"))
    save_weights(model, folder)
    return folder


def save_weights(model: nn.Module, folder: Path) -> None:
    weights = {
        name: value.detach().to("cpu", HALF).contiguous() for name, value in model.state_dict().items()
    }
    _save(weights, folder / "model.safetensors")


def load_model(folder: Path, device: str = "cpu") -> tuple[Qwen3, Tokenizer]:
    """As exported: rounded weights, computed with in full precision."""
    config = json.loads((folder / "config.json").read_bytes())
    shape = Shape(**{name: config[name] for name in asdict(Shape())})
    model = Qwen3(shape)
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class AdapterSettings:
    rank: int
    alpha: int
    targets: tuple[str, ...]


def save_adapter(
    weights: dict[str, torch.Tensor], settings: AdapterSettings, base: str, folder: Path
) -> Path:
    """`weights` by the names of PEFT, without their `base_model.model.` in front."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": list(settings.targets),
        "task_type": "CAUSAL_LM",
    }
    write(folder / "adapter_config.json", described)
    half = {
        f"base_model.model.{name}": value.detach().to("cpu", HALF).contiguous()
        for name, value in weights.items()
    }
    _save(half, folder / "adapter_model.safetensors")
    return folder


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "bos_token": END_OF_TEXT,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": shape.max_position_embeddings,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner reads


def write(path: Path, value: dict[str, Any] | list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
