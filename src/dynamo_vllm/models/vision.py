"""Makes tiny vision models with random weights: LLaVA, Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Each is what vLLM and transformers take for a model of its family, with about a million parameters. They say
nonsense in the words of `tiny`, other nonsense for every picture. No torch and no transformers here either:
the names and shapes of the weights are written down.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Shapes = Iterator[tuple[str, tuple[int, ...]]]

REVISION = 1
"""Raise it with every change to what the files hold."""
FAMILY_KEY = "dynamo_vllm_tiny_family"
TILE = 28
"""Pictures of Qwen2-VL and Qwen2.5-VL take one token for a square of so many pixels; Qwen3-VL's are 32."""

_SEED = 7
_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 128, 256, 2, 4, 2, 32
_EYE, _EYE_INTERMEDIATE, _EYE_HEADS = 64, 128, 2
_MAX_POSITIONS = 4096
_MERGED = 4 * _EYE  # Qwen joins squares of 2 by 2 patches
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 256 * 256
# transformers takes the sizes from `size`, the frontend, which counts a picture's tokens, from the others.
_PIXELS = {
    "size": {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS},
    "min_pixels": _MIN_PIXELS,
    "max_pixels": _MAX_PIXELS,
}
_COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
_LOOK = {**_COLOURS, **_STEPS, "rescale_factor": 1 / 255, "resample": 3}

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] %}
{%- for part in message['content'] %}
{%- if part['type'] == 'text' %}
{{- part['text'] }}
{%- elif part['type'] in ('image', 'image_url') %}
{{- '@IMAGE@' }}
{%- elif part['type'] in ('video', 'video_url') %}
{{- '@VIDEO@' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the tokens around its media, its configuration, its weights and how it reads pixels."""

    specials: tuple[str, ...]
    image: str
    """What stands for a picture in a prompt."""
    video: str
    config: Callable[[Mapping[str, int]], dict[str, Any]]
    shapes: Callable[[int], Shapes]
    projections: tuple[str, ...]
    """The layers whose output stands among the embeddings of tokens."""
    additions: tuple[str, ...]
    """The layers whose output is added to the stream later."""
    processors: Mapping[str, Mapping[str, Any]]
    """More files, by name."""


def make_tiny_vision_model(folder: Path, family: str) -> Path:
    """Put a model of one of `FAMILIES` into `folder`; a folder that already holds it is left as it is."""
    made = FAMILIES[family]
    kind = tiny.Kind(
        files=(*tiny.FILES, *made.processors),
        write=functools.partial(_write_files, family=family),
        mark={tiny.REVISION_KEY: REVISION, FAMILY_KEY: family},
    )
    return tiny.make(folder, kind)


def _write_files(folder: Path, family: str) -> None:
    from safetensors.numpy import save_file

    made = FAMILIES[family]
    specials = (*tiny.SPECIAL_TOKENS, *made.specials)
    template = _TEMPLATE.replace("@IMAGE@", made.image).replace("@VIDEO@", made.video)
    vocabulary = tiny.write_tokenizer(folder, specials, template)
    mark = {tiny.REVISION_KEY: REVISION, FAMILY_KEY: family}
    tiny.write_json(folder / "config.json", {**made.config(vocabulary), **mark, "torch_dtype": "float32"})
    tiny.write_json(folder / "generation_config.json", tiny.token_ids())
    for name, content in made.processors.items():
        tiny.write_json(folder / name, content)
    weights = _weights(made, vocabulary, specials)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(
    family: Family, vocabulary: Mapping[str, int], specials: Sequence[str]
) -> dict[str, NDArray[np.float32]]:
    """Random, but for what keeps lone blanks and special tokens out of answers, as in `tiny`.

    The first component of the stream is 1 everywhere and nothing adds to it: a bias for the head.
    """
    import numpy as np

    random = np.random.default_rng(_SEED)

    def spread(name: str, shape: tuple[int, ...]) -> float:
        if "embed_tokens" in name:
            return 0.5
        if "lm_head" in name:
            return 0.06
        return 1.2 / float(np.sqrt(np.prod(shape[1:])))

    weights: dict[str, NDArray[np.float32]] = {}
    for name, shape in family.shapes(len(vocabulary)):
        if "norm" in name or "ln_q" in name:
            value = np.full(shape, float(name.endswith("weight")), np.float32)
        elif name.endswith("bias"):
            value = np.zeros(shape, np.float32)
        else:
            value = random.standard_normal(shape, np.float32) * np.float32(spread(name, shape))
        weights[name] = value
        if name.endswith(("embed_tokens.weight",)):
            value[:, 0] = 1.0
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight")) and shape[0] == _HIDDEN:
            value[0] = 0.0
        elif name.endswith("lm_head.weight"):
            ends = vocabulary[tiny.TURN_END]
            silent = [vocabulary[token] for token in specials if vocabulary[token] != ends]
            value[tiny.blanks(vocabulary) + silent, 0] = -20.0
    for layer in (*family.projections, *family.additions):
        weights[f"{layer}.weight"][0] = 0.0
    for layer in family.projections:
        weights[f"{layer}.bias"][0] = 1.0
    return weights


# --- what the families share ----------------------------------------------------------------------------


def _text_config(vocabulary: Mapping[str, int], **more: Any) -> dict[str, Any]:
    return {
        **tiny.token_ids(),
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": _MAX_POSITIONS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": len(vocabulary),
        **more,
    }


def _text_shapes(
    vocab_size: int, model: str, head: str, has_bias: bool = False, has_head_norms: bool = False
) -> Shapes:
    yield f"{model}.embed_tokens.weight", (vocab_size, _HIDDEN)
    yield f"{model}.norm.weight", (_HIDDEN,)
    yield f"{head}.weight", (vocab_size, _HIDDEN)
    for index in range(_LAYERS):
        at = f"{model}.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", (_HIDDEN,)
        for name, heads in (("q", _HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            yield f"{at}.self_attn.{name}_proj.weight", (heads * _HEAD_DIM, _HIDDEN)
            if has_bias:
                yield f"{at}.self_attn.{name}_proj.bias", (heads * _HEAD_DIM,)
        if has_head_norms:
            for name in ("q_norm", "k_norm"):
                yield f"{at}.self_attn.{name}.weight", (_HEAD_DIM,)
        yield f"{at}.self_attn.o_proj.weight", (_HIDDEN, _HEADS * _HEAD_DIM)
        yield f"{at}.mlp.gate_proj.weight", (_INTERMEDIATE, _HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (_INTERMEDIATE, _HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (_HIDDEN, _INTERMEDIATE)


def _linear(name: str, out: int, into: int) -> Shapes:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


def _norm(name: str, size: int) -> Shapes:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


# --- LLaVA ----------------------------------------------------------------------------------------------

_LLAVA_SIZE, _LLAVA_PATCH, _LLAVA_LAYERS = 56, 14, 3
LLAVA_TOKENS = (_LLAVA_SIZE // _LLAVA_PATCH) ** 2
"""Of every picture."""


def _llava_config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_seq_length": LLAVA_TOKENS,
        "image_token_index": vocabulary["<image>"],
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": _text_config(vocabulary, model_type="llama", head_dim=_HEAD_DIM, rope_parameters=rope),
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu",
            "hidden_size": _EYE,
            "image_size": _LLAVA_SIZE,
            "intermediate_size": _EYE_INTERMEDIATE,
            "num_attention_heads": _EYE_HEADS,
            "num_hidden_layers": _LLAVA_LAYERS,
            "patch_size": _LLAVA_PATCH,
            "projection_dim": _EYE,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _llava_shapes(vocab_size: int) -> Shapes:
    yield from _text_shapes(vocab_size, "language_model.model", "language_model.lm_head")
    yield from _linear("multi_modal_projector.linear_1", _HIDDEN, _EYE)
    yield from _linear("multi_modal_projector.linear_2", _HIDDEN, _HIDDEN)
    eye = "vision_tower.vision_model"  # vLLM 0.30 does not find these under the names transformers writes
    yield f"{eye}.embeddings.class_embedding", (_EYE,)
    yield f"{eye}.embeddings.patch_embedding.weight", (_EYE, 3, _LLAVA_PATCH, _LLAVA_PATCH)
    yield f"{eye}.embeddings.position_embedding.weight", (LLAVA_TOKENS + 1, _EYE)
    yield from _norm(f"{eye}.pre_layrnorm", _EYE)
    yield from _norm(f"{eye}.post_layernorm", _EYE)
    for index in range(_LLAVA_LAYERS):
        at = f"{eye}.encoder.layers.{index}"
        yield from _norm(f"{at}.layer_norm1", _EYE)
        yield from _norm(f"{at}.layer_norm2", _EYE)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{at}.self_attn.{name}", _EYE, _EYE)
        yield from _linear(f"{at}.mlp.fc1", _EYE_INTERMEDIATE, _EYE)
        yield from _linear(f"{at}.mlp.fc2", _EYE, _EYE_INTERMEDIATE)


_LLAVA = Family(
    specials=("<image>",),
    image="<image>\\n",
    video="",
    config=_llava_config,
    shapes=_llava_shapes,
    projections=("multi_modal_projector.linear_2",),
    additions=(),
    processors={
        "preprocessor_config.json": {
            **_LOOK,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "crop_size": {"height": _LLAVA_SIZE, "width": _LLAVA_SIZE},
            "do_center_crop": True,
            "size": {"shortest_edge": _LLAVA_SIZE},
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": _LLAVA_PATCH,
            "vision_feature_select_strategy": "default",
        },
    },
)

# --- Qwen -----------------------------------------------------------------------------------------------

_QWEN_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


def _qwen_config(
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
        "text_config": _text_config(vocabulary, **text),
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "in_channels": 3,
            "num_heads": _EYE_HEADS,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
    }


def _qwen_processors(name: str, video_processor: str, patch: int) -> dict[str, dict[str, Any]]:
    shared = {**_LOOK, **_PIXELS, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
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


def _qwen_blocks(eye: str, depth: int, mlp: Sequence[tuple[str, int, int]], has_norm_bias: bool) -> Shapes:
    for index in range(depth):
        at = f"{eye}.blocks.{index}"
        for name in ("norm1", "norm2"):
            yield f"{at}.{name}.weight", (_EYE,)
            if has_norm_bias:
                yield f"{at}.{name}.bias", (_EYE,)
        yield from _linear(f"{at}.attn.qkv", 3 * _EYE, _EYE)
        yield from _linear(f"{at}.attn.proj", _EYE, _EYE)
        for name, out, into in mlp:
            yield from _linear(f"{at}.mlp.{name}", out, into)


def _qwen2_vl_config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    vision = {
        "depth": 2,
        "embed_dim": _EYE,
        "hidden_act": "quick_gelu",
        "hidden_size": _HIDDEN,
        "mlp_ratio": _EYE_INTERMEDIATE // _EYE,
        "patch_size": 14,
    }
    return _qwen_config(vocabulary, "Qwen2VL", "qwen2_vl", vision)


def _qwen2_vl_shapes(vocab_size: int) -> Shapes:
    yield from _text_shapes(vocab_size, "model", "lm_head", has_bias=True)
    yield "visual.patch_embed.proj.weight", (_EYE, 3, 2, 14, 14)
    mlp = (("fc1", _EYE_INTERMEDIATE, _EYE), ("fc2", _EYE, _EYE_INTERMEDIATE))
    yield from _qwen_blocks("visual", 2, mlp, has_norm_bias=True)
    yield from _norm("visual.merger.ln_q", _EYE)
    yield from _linear("visual.merger.mlp.0", _MERGED, _MERGED)
    yield from _linear("visual.merger.mlp.2", _HIDDEN, _MERGED)


_QWEN2_VL = Family(
    specials=_QWEN_SPECIALS,
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
    config=_qwen2_vl_config,
    shapes=_qwen2_vl_shapes,
    projections=("visual.merger.mlp.2",),
    additions=(),
    processors=_qwen_processors("Qwen2VL", "Qwen2VLVideoProcessor", 14),
)


def _qwen2_5_vl_config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    vision = {
        "depth": 2,
        "fullatt_block_indexes": [1],
        "hidden_act": "silu",
        "hidden_size": _EYE,
        "intermediate_size": _EYE_INTERMEDIATE,
        "out_hidden_size": _HIDDEN,
        "patch_size": 14,
        "tokens_per_second": 2,
        "window_size": 56,
    }
    return _qwen_config(vocabulary, "Qwen2_5_VL", "qwen2_5_vl", vision)


def _qwen2_5_vl_shapes(vocab_size: int) -> Shapes:
    yield from _text_shapes(vocab_size, "model", "lm_head", has_bias=True)
    yield "visual.patch_embed.proj.weight", (_EYE, 3, 2, 14, 14)
    mlp = (
        ("gate_proj", _EYE_INTERMEDIATE, _EYE),
        ("up_proj", _EYE_INTERMEDIATE, _EYE),
        ("down_proj", _EYE, _EYE_INTERMEDIATE),
    )
    yield from _qwen_blocks("visual", 2, mlp, has_norm_bias=False)
    yield "visual.merger.ln_q.weight", (_EYE,)
    yield from _linear("visual.merger.mlp.0", _MERGED, _MERGED)
    yield from _linear("visual.merger.mlp.2", _HIDDEN, _MERGED)


_QWEN2_5_VL = Family(
    specials=_QWEN_SPECIALS,
    image=_QWEN2_VL.image,
    video=_QWEN2_VL.video,
    config=_qwen2_5_vl_config,
    shapes=_qwen2_5_vl_shapes,
    projections=("visual.merger.mlp.2",),
    additions=(),
    processors=_qwen_processors("Qwen2_5_VL", "Qwen2VLVideoProcessor", 14),
)

_QWEN3_DEPTH, _QWEN3_STACKED = 3, (0, 1)


def _qwen3_vl_config(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    vision = {
        "deepstack_visual_indexes": list(_QWEN3_STACKED),
        "depth": _QWEN3_DEPTH,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": _EYE,
        "intermediate_size": _EYE_INTERMEDIATE,
        "num_position_embeddings": 64,
        "out_hidden_size": _HIDDEN,
        "patch_size": 16,
    }
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    }
    return _qwen_config(vocabulary, "Qwen3VL", "qwen3_vl", vision, head_dim=_HEAD_DIM, rope_parameters=rope)


def _qwen3_vl_shapes(vocab_size: int) -> Shapes:
    yield from _text_shapes(vocab_size, "model.language_model", "lm_head", has_head_norms=True)
    eye = "model.visual"
    yield f"{eye}.patch_embed.proj.weight", (_EYE, 3, 2, 16, 16)
    yield f"{eye}.patch_embed.proj.bias", (_EYE,)
    yield f"{eye}.pos_embed.weight", (64, _EYE)
    mlp = (("linear_fc1", _EYE_INTERMEDIATE, _EYE), ("linear_fc2", _EYE, _EYE_INTERMEDIATE))
    yield from _qwen_blocks(eye, _QWEN3_DEPTH, mlp, has_norm_bias=True)
    mergers = [(f"{eye}.deepstack_merger_list.{index}", _MERGED) for index in range(len(_QWEN3_STACKED))]
    for merger, norm_size in (*mergers, (f"{eye}.merger", _EYE)):
        yield from _norm(f"{merger}.norm", norm_size)
        yield from _linear(f"{merger}.linear_fc1", _MERGED, _MERGED)
        yield from _linear(f"{merger}.linear_fc2", _HIDDEN, _MERGED)


_QWEN3_VL = Family(
    specials=_QWEN_SPECIALS,
    image=_QWEN2_VL.image,
    video=_QWEN2_VL.video,
    config=_qwen3_vl_config,
    shapes=_qwen3_vl_shapes,
    projections=("model.visual.merger.linear_fc2",),
    additions=tuple(f"model.visual.deepstack_merger_list.{i}.linear_fc2" for i in range(len(_QWEN3_STACKED))),
    processors=_qwen_processors("Qwen3VL", "Qwen3VLVideoProcessor", 16),
)

FAMILIES: Mapping[str, Family] = {
    "llava": _LLAVA,
    "qwen2-vl": _QWEN2_VL,
    "qwen2.5-vl": _QWEN2_5_VL,
    "qwen3-vl": _QWEN3_VL,
}
