"""Computes the weights of a model from a config.json: one function per kind of layer, one line per family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing import encoders, vision
from dynamo_vllm.sizing.parts import Cache, Facts, Layer, Model, Part, Split, Weight, matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Family:
    """How the families of decoders differ."""

    has_qkv_bias: bool = False
    has_head_norms: bool = False
    norms: int = 2
    is_tied: bool = False
    """If the file does not say."""
    windows: Callable[[Facts], list[int | None]] | None = None
    attention: str = "heads"
    mlp: str = "dense"


# --- which layers look back how far ---------------------------------------------------------------------


def _listed_windows(facts: Facts) -> list[int | None] | None:
    """As `layer_types` says, which newer files have."""
    kinds, window = facts.list("layer_types"), facts.optional("sliding_window")
    if kinds is None:
        return None
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise ConfigError(
                f"{facts.source}: layer_types has {kind!r}; full_attention and sliding_attention are known"
            )
    return [known[str(kind)] for kind in kinds]


def _everywhere(facts: Facts) -> list[int | None]:
    return [facts.optional("sliding_window")] * facts.positive("num_hidden_layers")


def _every_other(facts: Facts) -> list[int | None]:
    window = facts.optional("sliding_window")
    return [None if index % 2 else window for index in range(facts.positive("num_hidden_layers"))]


def _all_but_each_sixth(facts: Facts) -> list[int | None]:
    pattern, window = facts.positive("sliding_window_pattern", default=6), facts.optional("sliding_window")
    return [window if (index + 1) % pattern else None for index in range(facts.positive("num_hidden_layers"))]


def _late_ones(facts: Facts) -> list[int | None]:
    count = facts.positive("num_hidden_layers")
    if not facts.flag("use_sliding_window", False):
        return [None] * count
    first = facts.number("max_window_layers", default=count)
    return [facts.optional("sliding_window") if index >= first else None for index in range(count)]


def _windows(facts: Facts, family: Family) -> list[int | None]:
    count = facts.positive("num_hidden_layers")
    if family.windows is None:
        return [None] * count
    # Of Qwen every layer may be "full_attention" in a list; `use_sliding_window` is then false too.
    found = _listed_windows(facts) or family.windows(facts)
    if len(found) != count:
        raise ConfigError(f"{facts.source}: layer_types has {len(found)} entries for {count} layers")
    return found


# --- attention ------------------------------------------------------------------------------------------


def _heads(facts: Facts) -> tuple[int, int, int]:
    heads = facts.positive("num_attention_heads")
    size = facts.positive("head_dim", default=facts.positive("hidden_size") // heads)
    return heads, facts.positive("num_key_value_heads", default=heads), size


def _head_attention(facts: Facts, family: Family) -> Iterator[Weight]:
    hidden, (heads, kv_heads, size) = facts.positive("hidden_size"), _heads(facts)
    biased = facts.flag("attention_bias", False)
    for count, split in ((heads, Split.SHARDS), (kv_heads, Split.KV_HEADS), (kv_heads, Split.KV_HEADS)):
        has_bias = family.has_qkv_bias or biased
        yield from matrix(Part.ATTENTION, count * size, hidden, split, has_bias=has_bias)
    yield Weight(Part.ATTENTION, heads * size * hidden, Split.SHARDS, is_linear=True)
    # GLM's attention_bias is for queries, keys and values alone.
    if biased and facts.values.get("model_type") != "glm4_moe":
        yield Weight(Part.ATTENTION, hidden)
    if family.has_head_norms or facts.flag("use_qk_norm", False):
        yield Weight(Part.NORMS, 2 * size)
    if facts.values.get("model_type") == "gpt_oss":  # sinks
        yield Weight(Part.ATTENTION, heads, Split.SHARDS)


def _latent_attention(facts: Facts, _: Family) -> Iterator[Weight]:
    """MLA: keys and values are kept as one latent per token, with a rotated part."""
    hidden, heads = facts.positive("hidden_size"), facts.positive("num_attention_heads")
    nope, rope = facts.positive("qk_nope_head_dim"), facts.positive("qk_rope_head_dim")
    value, latent = facts.positive("v_head_dim"), facts.positive("kv_lora_rank")
    query = facts.optional("q_lora_rank")
    if query:
        yield Weight(Part.ATTENTION, hidden * query, is_linear=True)
        yield Weight(Part.NORMS, query)
    yield Weight(Part.ATTENTION, (query or hidden) * heads * (nope + rope), Split.SHARDS, is_linear=True)
    yield Weight(Part.ATTENTION, hidden * (latent + rope), is_linear=True)
    yield Weight(Part.NORMS, latent)
    yield Weight(Part.ATTENTION, latent * heads * (nope + value), Split.SHARDS, is_linear=True, copied=True)
    yield Weight(Part.ATTENTION, heads * value * hidden, Split.SHARDS, is_linear=True)


def _cache(facts: Facts, family: Family, window: int | None) -> Cache:
    if family.attention == "latent":
        return Cache(1, facts.positive("kv_lora_rank") + facts.positive("qk_rope_head_dim"), window)
    _, kv_heads, size = _heads(facts)
    return Cache(kv_heads, 2 * size, window)


# --- MLPs and experts -----------------------------------------------------------------------------------


def _dense(facts: Facts, part: Part = Part.MLP, width: int | None = None) -> Iterator[Weight]:
    hidden = facts.positive("hidden_size")
    width = facts.positive("intermediate_size") if width is None else width
    has_bias = facts.flag("mlp_bias", False)
    yield from matrix(part, 2 * width, hidden, Split.SHARDS, has_bias=has_bias)
    yield Weight(part, hidden * width, Split.SHARDS, is_linear=True)
    if has_bias:
        yield Weight(part, hidden)


def _experts(facts: Facts) -> tuple[int, int, int]:
    """Return how many experts there are, how many a token uses, and their width."""
    count = facts.positive("n_routed_experts", "num_experts", "num_local_experts")
    chosen = facts.positive("num_experts_per_tok", "experts_per_token")
    if chosen > count:
        raise ConfigError(f"{facts.source}: num_experts_per_tok {chosen} is above the {count} experts")
    return count, chosen, facts.positive("moe_intermediate_size", "intermediate_size")


def _routed(facts: Facts, has_bias: bool = False) -> Iterator[Weight]:
    hidden, (count, chosen, width) = facts.positive("hidden_size"), _experts(facts)
    bias = 2 * width + hidden if has_bias else 0
    one = 3 * hidden * width + bias
    yield Weight(
        Part.EXPERTS, count * one, Split.EXPERTS, is_linear=True, met=chosen * one, bias=count * bias
    )
    yield Weight(Part.ROUTER, count * hidden + (count if has_bias else 0))


def _sparse(facts: Facts) -> Iterator[Weight]:
    kind = str(facts.values.get("model_type"))
    yield from _routed(facts, has_bias=kind == "gpt_oss")
    # DeepSeek V3 and its kin balance experts with a correction per expert, in float32.
    if facts.values.get("topk_method") == "noaux_tc" or kind in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        yield Weight(Part.ROUTER, _experts(facts)[0], is_float32=True)
    if width := _shared_width(facts):
        yield from _dense(facts, Part.SHARED_EXPERTS, width)
        if kind == "qwen2_moe":  # a gate of its own
            yield Weight(Part.SHARED_EXPERTS, facts.positive("hidden_size"))


def _shared_width(facts: Facts) -> int:
    """Shared experts count as one MLP."""
    shared = facts.number("n_shared_experts", default=0)
    return facts.number("shared_expert_intermediate_size", default=shared * _experts(facts)[2])


def _is_sparse(facts: Facts, family: Family, index: int) -> bool:
    if family.mlp != "experts":
        return False
    dense = facts.list("mlp_only_layers") or ()
    step = facts.positive("decoder_sparse_step", "moe_layer_freq", default=1)
    if "first_k_dense_replace" in facts.values:
        return index >= facts.number("first_k_dense_replace") and index % step == 0
    return index not in dense and (index + 1) % step == 0


# --- the whole ------------------------------------------------------------------------------------------

_QWEN3 = Family(has_head_norms=True, windows=_late_ones)
_QWEN2 = Family(has_qkv_bias=True, windows=_late_ones)
_LATENT = Family(attention="latent", mlp="experts")

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows=_everywhere),
    "phi3": Family(windows=_everywhere),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma2": Family(norms=4, is_tied=True, windows=_every_other),
    "gemma3_text": Family(norms=4, is_tied=True, has_head_norms=True, windows=_all_but_each_sixth),
    "mixtral": Family(mlp="experts", windows=_everywhere),
    "qwen2_moe": Family(has_qkv_bias=True, windows=_late_ones, mlp="experts"),
    "qwen3_moe": Family(has_head_norms=True, windows=_late_ones, mlp="experts"),
    "glm4_moe": Family(mlp="experts"),
    "gpt_oss": Family(windows=_every_other, mlp="experts"),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": Family(has_head_norms=True, mlp="experts"),
}
"""By the config's `model_type`."""


def known() -> list[str]:
    """The families that this command knows."""
    return sorted(
        [name for name in FAMILIES if not name.endswith("_text")] + [*vision.FAMILIES, *encoders.FAMILIES]
    )


def read(config: dict[str, object], source: str) -> Model:
    """Return the model of a config.json; unknown parts are rejected by name."""
    facts = Facts(config, source)
    kind = facts.text("model_type")
    if kind in vision.FAMILIES:
        text = _text_facts(facts, kind)
        return _model(text, kind, tuple(vision.weights(facts, kind, text.positive("hidden_size"))), facts)
    if kind in encoders.FAMILIES:
        return encoders.read(facts, kind)
    if kind not in FAMILIES:
        raise ConfigError(
            f"{source}: model_type {kind!r} is not one whose layers are known here; known are "
            f"{', '.join(known())}"
        )
    return _model(facts, kind, (), facts)


def _text_facts(facts: Facts, kind: str) -> Facts:
    """The decoder's part of a model with a vision tower; older files have it at the top."""
    inner = facts.inner("text_config")
    values = dict(facts.values if inner is None else inner.values)
    named = str(values.get("model_type", ""))
    values["model_type"] = named if named in FAMILIES else f"{kind}_text"
    if values["model_type"] not in FAMILIES:
        raise ConfigError(f"{facts.source}: text_config: model_type {named!r} is not known here")
    return Facts(values, facts.source if inner is None else inner.source)


def _model(facts: Facts, kind: str, eye: tuple[Weight, ...], whole: Facts) -> Model:
    family = FAMILIES[str(facts.values["model_type"])]
    hidden, vocabulary = facts.positive("hidden_size"), facts.positive("vocab_size")
    attention = _latent_attention if family.attention == "latent" else _head_attention
    kinds: dict[tuple[bool, int | None], Layer] = {}
    layers = []
    for index, window in enumerate(_windows(facts, family)):
        kind_of = _is_sparse(facts, family, index), window
        if kind_of not in kinds:  # alike layers are one object: sizing goes over kinds, not over layers
            mlp = _sparse(facts) if kind_of[0] else _dense(facts)
            norms = Weight(Part.NORMS, family.norms * hidden)
            weights = (*attention(facts, family), *mlp, norms)
            kinds[kind_of] = Layer(weights, _cache(facts, family, window))
        layers.append(kinds[kind_of])
    is_tied = whole.flag("tie_word_embeddings", facts.flag("tie_word_embeddings", family.is_tied))
    table = Weight(Part.EMBEDDINGS, vocabulary * hidden, Split.SHARDS)
    head = () if is_tied else (Weight(Part.HEAD, vocabulary * hidden, Split.SHARDS),)
    parts = {weight.part for layer in kinds.values() for weight in layer.weights}
    widths = [facts.positive("intermediate_size")] if Part.MLP in parts else []
    widths += [_shared_width(facts)] if Part.SHARED_EXPERTS in parts else []
    experts, chosen, width = _experts(facts) if family.mlp == "experts" else (0, 0, 0)
    return Model(
        family=kind,
        hidden=hidden,
        vocabulary=vocabulary,
        max_len=facts.positive("max_position_embeddings"),
        heads=facts.positive("num_attention_heads"),
        kv_heads=1 if family.attention == "latent" else _heads(facts)[1],
        widths=tuple(widths),
        expert_width=width,
        experts=experts,
        chosen_experts=chosen,
        embeddings=(table,),
        layers=tuple(layers),
        ending=(Weight(Part.NORMS, hidden), *head),
        vision=eye,
        is_tied=is_tied,
        next_token_layers=facts.number("num_nextn_predict_layers", default=0),
    )
