"""Creates a tiny model that takes audio, with random weights: a Qwen2-Audio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny_models import vision
from tiny_models.vision_base import HIDDEN, Family, linear, norm, text_config, text_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tiny_models.vision_base import Shapes

RATE = 16_000
SECONDS = 30
"""The model's window in seconds; shorter audio is padded with silence."""
_HOP = 160
_ENCODER, _ENCODER_INTERMEDIATE, _ENCODER_HEADS, _ENCODER_LAYERS, _MELS = 64, 128, 2, 2, 40
"""The sizes of the audio encoder."""
_FRAMES = RATE * SECONDS // _HOP


def make_tiny_audio_input_model(folder: Path) -> Path:
    """Create the model in `folder`; a folder that has it is left as it is."""
    return vision.make(folder, "qwen2-audio", QWEN2_AUDIO)


def _config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "activation_function": "gelu",
            "d_model": _ENCODER,
            "encoder_attention_heads": _ENCODER_HEADS,
            "encoder_ffn_dim": _ENCODER_INTERMEDIATE,
            "encoder_layers": _ENCODER_LAYERS,
            "max_source_positions": _FRAMES // 2,
            "num_mel_bins": _MELS,
        },
        "audio_token_index": vocabulary["<|AUDIO|>"],
        "text_config": text_config(vocabulary, model_type="qwen2", rope_parameters=rope),
        "tie_word_embeddings": False,
    }


def _shapes(vocab_size: int) -> Shapes:
    yield from text_shapes(vocab_size, "language_model.model", "language_model.lm_head", has_bias=True)
    yield from linear("multi_modal_projector.linear", HIDDEN, _ENCODER)
    ear = "audio_tower"
    for name, channels in (("conv1", _MELS), ("conv2", _ENCODER)):
        yield f"{ear}.{name}.weight", (_ENCODER, channels, 3)
        yield f"{ear}.{name}.bias", (_ENCODER,)
    yield f"{ear}.embed_positions.weight", (_FRAMES // 2, _ENCODER)
    yield from norm(f"{ear}.layer_norm", _ENCODER)
    for index in range(_ENCODER_LAYERS):
        at = f"{ear}.layers.{index}"
        yield from norm(f"{at}.self_attn_layer_norm", _ENCODER)
        yield from norm(f"{at}.final_layer_norm", _ENCODER)
        yield f"{at}.self_attn.k_proj.weight", (_ENCODER, _ENCODER)
        for name in ("q_proj", "v_proj", "out_proj"):
            yield from linear(f"{at}.self_attn.{name}", _ENCODER, _ENCODER)
        yield from linear(f"{at}.fc1", _ENCODER_INTERMEDIATE, _ENCODER)
        yield from linear(f"{at}.fc2", _ENCODER, _ENCODER_INTERMEDIATE)


QWEN2_AUDIO = Family(
    specials=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    image="",
    video="",
    audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
    config=_config,
    shapes=_shapes,
    projections=("multi_modal_projector.linear",),
    additions=(),
    processors={
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "Qwen2AudioProcessor",
            "chunk_length": SECONDS,
            "feature_size": _MELS,
            "hop_length": _HOP,
            "n_fft": 400,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
            "sampling_rate": RATE,
        },
    },
)
