"""Writes a pipeline folder as diffusers, and so vLLM-Omni, reads it; and reads it again."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo.image import noise
from demo.image.autoencoder import AutoencoderShape
from demo.image.pipeline import Pipeline, Shapes
from demo.image.text import END, LENGTH, PADDING, START, TextShape
from demo.image.unet import EPSILON, UnetShape

HALF = torch.bfloat16
DIFFUSERS = "0.40.0"
FILES = {
    "text_encoder": "model.safetensors",
    "unet": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
}


def save(pipeline: Pipeline, folder: Path) -> Path:
    shapes, tokenizer = pipeline.shapes, pipeline.tokenizer
    _write(folder / "model_index.json", _index())
    _write(folder / "scheduler" / "scheduler_config.json", _named("DDIMScheduler") | noise.SETTINGS)
    _write(folder / "text_encoder" / "config.json", _text(shapes.text, tokenizer))
    _write(folder / "unet" / "config.json", _unet(shapes.unet))
    _write(folder / "vae" / "config.json", _autoencoder(shapes.autoencoder))
    _write(folder / "tokenizer" / "tokenizer_config.json", _tokenizer())
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    for name, part in pipeline.parts.items():
        path = folder / name / FILES[name]
        weights = {
            key: value.detach().to("cpu", HALF).contiguous() for key, value in part.state_dict().items()
        }
        save_file(weights, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner reads
    return folder


def load(folder: Path, device: str = "cpu") -> Pipeline:
    """As exported: rounded weights, computed with in full precision."""
    text, unet, autoencoder = (
        json.loads((folder / name / "config.json").read_bytes()) for name in ("text_encoder", "unet", "vae")
    )
    shapes = Shapes(
        TextShape(**{one.name: text[one.name] for one in fields(TextShape)}),
        UnetShape(**{one.name: _fixed(unet[_HEADS.get(one.name, one.name)]) for one in fields(UnetShape)}),
        AutoencoderShape(**{one.name: _fixed(autoencoder[one.name]) for one in fields(AutoencoderShape)}),
    )
    pipeline = Pipeline(Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")), shapes)
    for name, part in pipeline.parts.items():
        weights = load_file(folder / name / FILES[name])
        part.load_state_dict({key: value.float() for key, value in weights.items()})
        part.eval()
    return pipeline.to(device)


_HEADS = {"heads": "attention_head_dim"}
"""diffusers calls so the number of heads."""


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _index() -> dict[str, Any]:
    return _named("StableDiffusionPipeline") | {
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderTiny"],
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "safety_checker": [None, None],
        "requires_safety_checker": False,
    }


def _text(shape: TextShape, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["CLIPTextModel"],
        "model_type": "clip_text_model",
        **asdict(shape),
        "hidden_act": "gelu",
        "layer_norm_eps": EPSILON,
        "projection_dim": shape.hidden_size,
        "bos_token_id": tokenizer.token_to_id(START),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PADDING),
        "attention_dropout": 0.0,
        # As diffusers reads the other parts unless told otherwise; transformers would take that of the file.
        "dtype": "float32",
    }


def _unet(shape: UnetShape) -> dict[str, Any]:
    settings = asdict(shape)
    heads = settings.pop("heads")
    return _named("UNet2DConditionModel") | {
        **settings,
        "attention_head_dim": heads,
        "out_channels": shape.in_channels,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "act_fn": "silu",
        "norm_eps": EPSILON,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "center_input_sample": False,
        "downsample_padding": 1,
    }


def _autoencoder(shape: AutoencoderShape) -> dict[str, Any]:
    return _named("AutoencoderTiny") | {
        **asdict(shape),
        "in_channels": 3,
        "out_channels": 3,
        "act_fn": "relu",
        "scaling_factor": 1.0,
        "force_upcast": False,
    }


def _tokenizer() -> dict[str, Any]:
    return {
        "bos_token": START,
        "eos_token": END,
        "pad_token": PADDING,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LENGTH,
        "padding_side": "right",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _named(name: str) -> dict[str, Any]:
    return {"_class_name": name, "_diffusers_version": DIFFUSERS}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
