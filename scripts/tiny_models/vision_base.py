"""Defines what tiny vision and audio models share: their sizes, the language model, and names of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.models import tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Shapes = Iterator[tuple[str, tuple[int, ...]]]

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 2, 4, 2, 32
VISION, VISION_INTERMEDIATE, VISION_HEADS = 64, 128, 2
"""The sizes of the vision encoder."""
MAX_POSITIONS = 4096
MERGED = 4 * VISION  # Qwen joins squares of 2 by 2 patches
MIN_PIXELS, MAX_PIXELS = 56 * 56, 256 * 256
# transformers takes the sizes from `size`, the frontend, which counts an image's tokens, from the others.
PIXELS = {
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    "min_pixels": MIN_PIXELS,
    "max_pixels": MAX_PIXELS,
}
COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
PREPROCESSING = {**COLOURS, **STEPS, "rescale_factor": 1 / 255, "resample": 3}


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the tokens around its media, its configuration, its weights and how it reads them."""

    specials: tuple[str, ...]
    image: str
    """The placeholder of an image in a prompt."""
    video: str
    config: Callable[[Mapping[str, int]], dict[str, Any]]
    shapes: Callable[[int], Shapes]
    projections: tuple[str, ...]
    """The layers whose output replaces embeddings of tokens."""
    additions: tuple[str, ...]
    """The layers whose output is added to the stream later."""
    processors: Mapping[str, Mapping[str, Any]]
    """Further files, by name."""
    audio: str = ""


def text_config(vocabulary: Mapping[str, int], **more: Any) -> dict[str, Any]:
    return {
        **tiny.token_ids(),
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": len(vocabulary),
        **more,
    }


def text_shapes(
    vocab_size: int, model: str, head: str, has_bias: bool = False, has_head_norms: bool = False
) -> Shapes:
    yield f"{model}.embed_tokens.weight", (vocab_size, HIDDEN)
    yield f"{model}.norm.weight", (HIDDEN,)
    yield f"{head}.weight", (vocab_size, HIDDEN)
    for index in range(LAYERS):
        at = f"{model}.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{at}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
            if has_bias:
                yield f"{at}.self_attn.{name}_proj.bias", (heads * HEAD_DIM,)
        if has_head_norms:
            for name in ("q_norm", "k_norm"):
                yield f"{at}.self_attn.{name}.weight", (HEAD_DIM,)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{at}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)


def linear(name: str, out: int, into: int) -> Shapes:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


def norm(name: str, size: int) -> Shapes:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)
