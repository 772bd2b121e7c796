"""Creates a tiny pipeline that generates audio from a description, with random weights: an AudioLDM.

It hums noise, but different noise for every prompt, seed and number of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny_models import image

if TYPE_CHECKING:
    from pathlib import Path

RATE = 16_000
SAMPLES = 4096
"""The length of what it generates."""
_WIDTH = 32
_CHANNELS = (8, 16)
_LATENT_CHANNELS = 4
_BANDS = 16
"""Of the spectrogram between the decoder and the vocoder."""
_UPSAMPLING = (4, 4)
"""Samples for each column of the spectrogram, as factors."""
_INDEX = {
    "_class_name": "AudioLDMPipeline",
    "_diffusers_version": "0.40.0",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "ClapTextModelWithProjection"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "vocoder": ["transformers", "SpeechT5HifiGan"],
}


def make_tiny_audio_output_model(folder: Path) -> Path:
    """Create the model in `folder` and return it; a folder that has one is left as it is."""
    return image.made(folder, _INDEX, _parts)


def _parts(text: Path) -> dict[str, Any]:
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler
    from transformers import (
        ClapTextConfig,
        ClapTextModelWithProjection,
        SpeechT5HifiGan,
        SpeechT5HifiGanConfig,
    )

    torch.manual_seed(0)
    tokenizer = image.tokenizer_of(text)
    encoder = ClapTextModelWithProjection(
        ClapTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_WIDTH,
            intermediate_size=2 * _WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            projection_dim=_WIDTH,
            max_position_embeddings=2 * image.MAX_PROMPT_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vae = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=_LATENT_CHANNELS,
        block_out_channels=_CHANNELS,
        down_block_types=["DownEncoderBlock2D"] * len(_CHANNELS),
        up_block_types=["UpDecoderBlock2D"] * len(_CHANNELS),
        norm_num_groups=2,
    )
    vocoder = SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=_BANDS,
            sampling_rate=RATE,
            upsample_initial_channel=16,
            upsample_rates=list(_UPSAMPLING),
            upsample_kernel_sizes=[2 * factor for factor in _UPSAMPLING],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
            normalize_before=False,
            initializer_range=0.2,  # loud enough for 16 bits
        )
    )
    return {
        "scheduler": DDIMScheduler(clip_sample=False, steps_offset=1),
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "unet": _unet(),
        "vae": vae,
        "vocoder": vocoder,
    }


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    halvings = len(_CHANNELS) - 1
    return UNet2DConditionModel(
        sample_size=SAMPLES // (_UPSAMPLING[0] * _UPSAMPLING[1] * 2**halvings),
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        block_out_channels=_CHANNELS,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=_CHANNELS,
        attention_head_dim=4,
        norm_num_groups=2,
        # The prompt comes as a class.
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=_WIDTH,
        class_embeddings_concat=True,
    )
