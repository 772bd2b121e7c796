"""Creates a tiny LLaVA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny_models.vision_base import (
    HEAD_DIM,
    HIDDEN,
    PREPROCESSING,
    VISION,
    VISION_HEADS,
    VISION_INTERMEDIATE,
    Family,
    linear,
    norm,
    text_config,
    text_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiny_models.vision_base import Shapes

_SIZE, _PATCH, _VISION_LAYERS = 56, 14, 3
_TOKENS = (_SIZE // _PATCH) ** 2
"""How many tokens every image has."""


def _config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_seq_length": _TOKENS,
        "image_token_index": vocabulary["<image>"],
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": text_config(vocabulary, model_type="llama", head_dim=HEAD_DIM, rope_parameters=rope),
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu",
            "hidden_size": VISION,
            "image_size": _SIZE,
            "intermediate_size": VISION_INTERMEDIATE,
            "num_attention_heads": VISION_HEADS,
            "num_hidden_layers": _VISION_LAYERS,
            "patch_size": _PATCH,
            "projection_dim": VISION,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _shapes(vocab_size: int) -> Shapes:
    yield from text_shapes(vocab_size, "language_model.model", "language_model.lm_head")
    yield from linear("multi_modal_projector.linear_1", HIDDEN, VISION)
    yield from linear("multi_modal_projector.linear_2", HIDDEN, HIDDEN)
    eye = "vision_tower.vision_model"  # vLLM 0.30 does not find these under the names transformers writes
    yield f"{eye}.embeddings.class_embedding", (VISION,)
    yield f"{eye}.embeddings.patch_embedding.weight", (VISION, 3, _PATCH, _PATCH)
    yield f"{eye}.embeddings.position_embedding.weight", (_TOKENS + 1, VISION)
    yield from norm(f"{eye}.pre_layrnorm", VISION)
    yield from norm(f"{eye}.post_layernorm", VISION)
    for index in range(_VISION_LAYERS):
        at = f"{eye}.encoder.layers.{index}"
        yield from norm(f"{at}.layer_norm1", VISION)
        yield from norm(f"{at}.layer_norm2", VISION)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{at}.self_attn.{name}", VISION, VISION)
        yield from linear(f"{at}.mlp.fc1", VISION_INTERMEDIATE, VISION)
        yield from linear(f"{at}.mlp.fc2", VISION, VISION_INTERMEDIATE)


LLAVA = Family(
    specials=("<image>",),
    image="<image>\\n",
    video="",
    config=_config,
    shapes=_shapes,
    projections=("multi_modal_projector.linear_2",),
    additions=(),
    processors={
        "preprocessor_config.json": {
            **PREPROCESSING,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "crop_size": {"height": _SIZE, "width": _SIZE},
            "do_center_crop": True,
            "size": {"shortest_edge": _SIZE},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": _PATCH,
            "vision_feature_select_strategy": "default",
        },
    },
)
