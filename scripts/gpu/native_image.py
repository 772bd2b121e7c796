"""Makes a Qwen-Image with random weights and few layers: vLLM-Omni draws it with a pipeline of its own.

vLLM-Omni 0.30 knows no dummy weights for drawing stages, so they are written to a folder first.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_models.vision import make_tiny_vision_model

_LATENT_CHANNELS = 4
_INDEX = {
    "_class_name": "QwenImagePipeline",
    "_diffusers_version": "0.40.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}


@dataclass(frozen=True)
class Shape:
    """Of the part that draws."""

    layers: int
    heads: int
    head_width: int
    axes: tuple[int, int, int]
    """Of the head's width, for time, height and width."""
    vae_width: int


TINY = Shape(layers=2, heads=2, head_width=32, axes=(8, 12, 12), vae_width=8)
REAL_WIDTH = Shape(layers=2, heads=24, head_width=128, axes=(16, 56, 56), vae_width=96)
"""As wide as the real one, which has 60 layers."""


def make_native_image_model(folder: Path, shape: Shape, dtype: str) -> Path:
    """Put the model into `folder` and return it; all weights in `dtype`, as vLLM-Omni does not convert."""
    import torch
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    with tempfile.TemporaryDirectory() as scratch:
        text = make_tiny_vision_model(Path(scratch, "text"), "qwen2.5-vl")
        encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(text)
        tokenizer = AutoTokenizer.from_pretrained(text)
    parts: dict[str, Any] = {
        "transformer": QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * _LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_layers=shape.layers,
            attention_head_dim=shape.head_width,
            num_attention_heads=shape.heads,
            joint_attention_dim=encoder.config.text_config.hidden_size,
            guidance_embeds=False,
            axes_dims_rope=shape.axes,
        ).to(kind),
        "vae": AutoencoderKLQwenImage(
            base_dim=shape.vae_width,
            z_dim=_LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=1,
            attn_scales=[],
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * _LATENT_CHANNELS,
            latents_std=[1.0] * _LATENT_CHANNELS,
        ).to(kind),
        "text_encoder": encoder.to(kind),
        "tokenizer": tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9
        ),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    settings = folder / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
    (folder / "model_index.json").write_text(json.dumps(_INDEX, indent=2) + "\n")
    return folder
