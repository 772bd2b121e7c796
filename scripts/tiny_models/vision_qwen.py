"""Creates tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny_models.vision_base import (
    HEAD_DIM,
    HIDDEN,
    MERGED,
    PIXELS,
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
    from collections.abc import Mapping, Sequence

    from tiny_models.vision_base import Shapes

_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


def _config(
    vocabulary: Mapping[str, int], name: str, model_type: str, vision: dict[str, Any], **text: Any
) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    text = {"model_type": f"{model_type}_text", "rope_parameters": rope, **text}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": model_type,
        "image_token_id": vocabulary["<|image_pad|>"],
        "video_token_id": vocabulary["<|video_pad|>"],
        "vision_start_token_id": vocabulary["<|vision_start|>"],
        "vision_end_token_id": vocabulary["<|vision_end|>"],
        "text_config": text_config(vocabulary, **text),
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "in_channels": 3,
            "num_heads": VISION_HEADS,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
    }


def _processors(name: str, video_processor: str, patch: int) -> dict[str, dict[str, Any]]:
    shared = {**PREPROCESSING, **PIXELS, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    return {
        "preprocessor_config.json": {
            **shared,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": f"{name}Processor",
        },
        "video_preprocessor_config.json": {
            **shared,
            "video_processor_type": video_processor,
            "do_sample_frames": False,
            "fps": 2,
            "min_frames": 2,
            "max_frames": 16,
        },
    }


def _blocks(eye: str, depth: int, mlp: Sequence[tuple[str, int, int]], has_norm_bias: bool) -> Shapes:
    for index in range(depth):
        at = f"{eye}.blocks.{index}"
        for name in ("norm1", "norm2"):
            yield f"{at}.{name}.weight", (VISION,)
            if has_norm_bias:
                yield f"{at}.{name}.bias", (VISION,)
        yield from linear(f"{at}.attn.qkv", 3 * VISION, VISION)
        yield from linear(f"{at}.attn.proj", VISION, VISION)
        for name, out, into in mlp:
            yield from linear(f"{at}.mlp.{name}", out, into)


def _qwen2_vl_config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    vision = {
        "depth": 2,
        "embed_dim": VISION,
        "hidden_act": "quick_gelu",
        "hidden_size": HIDDEN,
        "mlp_ratio": VISION_INTERMEDIATE // VISION,
        "patch_size": 14,
    }
    return _config(vocabulary, "Qwen2VL", "qwen2_vl", vision)


def _qwen2_vl_shapes(vocab_size: int) -> Shapes:
    yield from text_shapes(vocab_size, "model", "lm_head", has_bias=True)
    yield "visual.patch_embed.proj.weight", (VISION, 3, 2, 14, 14)
    mlp = (("fc1", VISION_INTERMEDIATE, VISION), ("fc2", VISION, VISION_INTERMEDIATE))
    yield from _blocks("visual", 2, mlp, has_norm_bias=True)
    yield from norm("visual.merger.ln_q", VISION)
    yield from linear("visual.merger.mlp.0", MERGED, MERGED)
    yield from linear("visual.merger.mlp.2", HIDDEN, MERGED)


QWEN2_VL = Family(
    specials=_SPECIALS,
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
    config=_qwen2_vl_config,
    shapes=_qwen2_vl_shapes,
    projections=("visual.merger.mlp.2",),
    additions=(),
    processors=_processors("Qwen2VL", "Qwen2VLVideoProcessor", 14),
)


def _qwen2_5_vl_config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    vision = {
        "depth": 2,
        "fullatt_block_indexes": [1],
        "hidden_act": "silu",
        "hidden_size": VISION,
        "intermediate_size": VISION_INTERMEDIATE,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "tokens_per_second": 2,
        "window_size": 56,
    }
    return _config(vocabulary, "Qwen2_5_VL", "qwen2_5_vl", vision)


def _qwen2_5_vl_shapes(vocab_size: int) -> Shapes:
    yield from text_shapes(vocab_size, "model", "lm_head", has_bias=True)
    yield "visual.patch_embed.proj.weight", (VISION, 3, 2, 14, 14)
    mlp = (
        ("gate_proj", VISION_INTERMEDIATE, VISION),
        ("up_proj", VISION_INTERMEDIATE, VISION),
        ("down_proj", VISION, VISION_INTERMEDIATE),
    )
    yield from _blocks("visual", 2, mlp, has_norm_bias=False)
    yield "visual.merger.ln_q.weight", (VISION,)
    yield from linear("visual.merger.mlp.0", MERGED, MERGED)
    yield from linear("visual.merger.mlp.2", HIDDEN, MERGED)


QWEN2_5_VL = Family(
    specials=_SPECIALS,
    image=QWEN2_VL.image,
    video=QWEN2_VL.video,
    config=_qwen2_5_vl_config,
    shapes=_qwen2_5_vl_shapes,
    projections=("visual.merger.mlp.2",),
    additions=(),
    processors=_processors("Qwen2_5_VL", "Qwen2VLVideoProcessor", 14),
)

_QWEN3_DEPTH, _QWEN3_STACKED = 3, (0, 1)


def _qwen3_vl_config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    vision = {
        "deepstack_visual_indexes": list(_QWEN3_STACKED),
        "depth": _QWEN3_DEPTH,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": VISION,
        "intermediate_size": VISION_INTERMEDIATE,
        "num_position_embeddings": 64,
        "out_hidden_size": HIDDEN,
        "patch_size": 16,
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    }
    return _config(vocabulary, "Qwen3VL", "qwen3_vl", vision, head_dim=HEAD_DIM, rope_parameters=rope)


def _qwen3_vl_shapes(vocab_size: int) -> Shapes:
    yield from text_shapes(vocab_size, "model.language_model", "lm_head", has_head_norms=True)
    eye = "model.visual"
    yield f"{eye}.patch_embed.proj.weight", (VISION, 3, 2, 16, 16)
    yield f"{eye}.patch_embed.proj.bias", (VISION,)
    yield f"{eye}.pos_embed.weight", (64, VISION)
    mlp = (("linear_fc1", VISION_INTERMEDIATE, VISION), ("linear_fc2", VISION, VISION_INTERMEDIATE))
    yield from _blocks(eye, _QWEN3_DEPTH, mlp, has_norm_bias=True)
    mergers = [(f"{eye}.deepstack_merger_list.{index}", MERGED) for index in range(len(_QWEN3_STACKED))]
    for merger, norm_size in (*mergers, (f"{eye}.merger", VISION)):
        yield from norm(f"{merger}.norm", norm_size)
        yield from linear(f"{merger}.linear_fc1", MERGED, MERGED)
        yield from linear(f"{merger}.linear_fc2", HIDDEN, MERGED)


QWEN3_VL = Family(
    specials=_SPECIALS,
    image=QWEN2_VL.image,
    video=QWEN2_VL.video,
    config=_qwen3_vl_config,
    shapes=_qwen3_vl_shapes,
    projections=("model.visual.merger.linear_fc2",),
    additions=tuple(f"model.visual.deepstack_merger_list.{i}.linear_fc2" for i in range(len(_QWEN3_STACKED))),
    processors=_processors("Qwen3VL", "Qwen3VLVideoProcessor", 16),
)
