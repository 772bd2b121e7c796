"""Creates tiny pipelines with random weights, some hundred thousand numbers, as diffusers folders.

A Stable Diffusion and its sister for videos. They draw coloured noise, but different noise for every prompt,
seed, size and number of steps. Needs diffusers and torch, which come with the `omni` extra.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm.models.tiny import make_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PROMPT_TOKENS = 77
SIDE = 64
"""The default size of an image."""
_TEXT_WIDTH = 32
_CHANNELS = (8, 16)
_LATENT_CHANNELS = 4
_HALVINGS = 3
_INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.40.0",
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


_VIDEO_INDEX = {name: part for name, part in _INDEX.items() if part not in (False, [None, None])} | {
    "_class_name": "TextToVideoSDPipeline",
    "unet": ["diffusers", "UNet3DConditionModel"],
}


def make_tiny_image_model(folder: Path, *, rewriter: bool = False) -> Path:
    """Create the model in `folder` and return it; a folder that has one is left as it is.

    With `rewriter`, a tiny language model inside rewrites prompts: a pipeline of two stages.
    """
    return made(folder, _INDEX, lambda text: _parts(text, _unet), rewriter=rewriter)


def make_tiny_video_model(folder: Path) -> Path:
    """The same for videos."""
    return made(folder, _VIDEO_INDEX, lambda text: _parts(text, _video_unet))


def made(
    folder: Path,
    index: dict[str, Any],
    parts: Callable[[Path], dict[str, Any]],
    *,
    rewriter: bool = False,
) -> Path:
    """Create a pipeline of `parts`, which are made with the tokenizer of a tiny language model."""
    if (folder / "model_index.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch, "new")
        text = make_tiny_model(Path(scratch, "text"))
        for name, part in parts(text).items():
            part.save_pretrained(new / name)
        if rewriter:
            shutil.copytree(text, new / "rewriter")
        (new / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
        new.rename(folder)
    return folder


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=SIDE // 2**_HALVINGS,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        block_out_channels=_CHANNELS,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=_TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=2,
    )


def _video_unet() -> Any:
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(
        sample_size=SIDE // 2**_HALVINGS,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        block_out_channels=_CHANNELS,
        layers_per_block=1,
        down_block_types=("DownBlock3D", "CrossAttnDownBlock3D"),
        up_block_types=("CrossAttnUpBlock3D", "UpBlock3D"),
        cross_attention_dim=_TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=2,
    )


def tokenizer_of(text: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text)
    tokenizer.model_max_length = MAX_PROMPT_TOKENS
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _parts(text: Path, unet: Callable[[], Any]) -> dict[str, Any]:
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    tokenizer = tokenizer_of(text)
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            projection_dim=_TEXT_WIDTH,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    denoiser = unet()
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=_LATENT_CHANNELS,
        block_out_channels=[8, *[16] * _HALVINGS],
        down_block_types=["DownEncoderBlock2D"] * (_HALVINGS + 1),
        up_block_types=["UpDecoderBlock2D"] * (_HALVINGS + 1),
        norm_num_groups=2,
    )
    # Unclipped: random weights predict far outside of what a trained model does.
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
    return {
        "scheduler": scheduler,
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "unet": denoiser,
        "vae": vae,
    }
