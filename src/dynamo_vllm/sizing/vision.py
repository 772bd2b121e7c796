"""Computes the weights of vision towers, with the projection into the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing.parts import Facts, Part, Split, Weight, matrix, times

Tower = Callable[[Facts, int], Iterator[Weight]]


def _linear(rows: int, columns: int) -> Iterator[Weight]:
    yield from matrix(Part.VISION, rows, columns, Split.WHOLE, has_bias=True)


def _plain(count: int) -> Weight:
    return Weight(Part.VISION, count)


def _llava(facts: Facts, hidden: int) -> Iterator[Weight]:
    """A CLIP or SigLIP tower and two linear layers."""
    eye = _inner(facts)
    kind = eye.values.get("model_type")
    if kind not in _BEFORE_THE_LAYERS:
        raise ConfigError(
            f"{eye.source}: model_type {kind!r} is not a known vision encoder; "
            f"{' and '.join(_BEFORE_THE_LAYERS)} are"
        )
    size, inner = eye.positive("hidden_size"), eye.positive("intermediate_size")
    patch, side = eye.positive("patch_size"), eye.positive("image_size")
    yield _plain(size * 3 * patch * patch)
    yield _plain((side // patch) ** 2 * size)
    yield _plain(_BEFORE_THE_LAYERS[kind] * size)
    block = [*_linear(4 * size, size), *_linear(inner, size), *_linear(size, inner), _plain(4 * size)]
    yield from times(block, eye.positive("num_hidden_layers"))
    yield from _linear(hidden, size)
    yield from _linear(hidden, hidden)


_BEFORE_THE_LAYERS = {
    "clip_vision_model": 1 + 1 + 2 * 2,  # the class token, its position, two norms
    "siglip_vision_model": 1,  # the bias of the patches; LLaVA leaves out what is behind the layers
}
"""Rows of the tower's width beside the patches and their positions."""


def _qwen2(facts: Facts, hidden: int) -> Iterator[Weight]:
    eye = _inner(facts)
    size = eye.positive("embed_dim", default=1280)
    inner = size * eye.positive("mlp_ratio", default=4)
    yield _plain(_patches(eye, size, default_patch=14))
    block = [
        *_linear(4 * size, size),
        *_linear(inner, size),
        *_linear(size, inner),
        _plain(4 * size),
    ]
    yield from times(block, eye.positive("depth", default=32))
    yield from _merger(eye, size, hidden, norm=2 * size)


def _qwen2_5(facts: Facts, hidden: int) -> Iterator[Weight]:
    eye = _inner(facts)
    size, inner = eye.positive("hidden_size", default=1280), eye.positive("intermediate_size", default=3420)
    yield _plain(_patches(eye, size, default_patch=14))
    block = [
        *_linear(4 * size, size),
        *_linear(2 * inner, size),
        *_linear(size, inner),
        _plain(2 * size),
    ]
    yield from times(block, eye.positive("depth", default=32))
    yield from _merger(eye, size, hidden, norm=size)


def _qwen3(facts: Facts, hidden: int) -> Iterator[Weight]:
    eye = _inner(facts)
    size, inner = eye.positive("hidden_size", default=1152), eye.positive("intermediate_size", default=4304)
    yield _plain(_patches(eye, size, default_patch=16) + size)
    yield _plain(eye.positive("num_position_embeddings", default=2304) * size)
    block = [
        *_linear(4 * size, size),
        *_linear(inner, size),
        *_linear(size, inner),
        _plain(4 * size),
    ]
    yield from times(block, eye.positive("depth", default=27))
    merged = size * eye.positive("spatial_merge_size", default=2) ** 2
    for _ in eye.list("deepstack_visual_indexes") or (8, 16, 24):
        yield from _merger(eye, size, hidden, norm=2 * merged)
    yield from _merger(eye, size, hidden, norm=2 * size)


def _inner(facts: Facts) -> Facts:
    eye = facts.inner("vision_config")
    if eye is None:
        raise ConfigError(f"{facts.source}: vision_config is missing; the tower cannot be counted without it")
    return eye


def _patches(eye: Facts, size: int, default_patch: int) -> int:
    patch = eye.positive("patch_size", default=default_patch)
    frames, channels = eye.positive("temporal_patch_size", default=2), eye.positive("in_channels", default=3)
    return size * channels * frames * patch * patch


def _merger(eye: Facts, size: int, hidden: int, norm: int) -> Iterator[Weight]:
    """Merges squares of patches into one row for the decoder."""
    merged = size * eye.positive("spatial_merge_size", default=2) ** 2
    yield _plain(norm)
    yield from _linear(merged, merged)
    yield from _linear(hidden, merged)


FAMILIES: dict[str, Tower] = {
    "llava": _llava,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
}
"""By the config's `model_type`."""


def weights(facts: Facts, kind: str, hidden: int) -> Iterator[Weight]:
    return FAMILIES[kind](facts, hidden)
