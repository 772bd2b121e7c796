"""Computes what a layout needs on each GPU, and what is left for KV caches."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing.formats import CACHE_DTYPES, WeightFormat
from dynamo_vllm.sizing.gpus import GIB, Gpu
from dynamo_vllm.sizing.parts import Layer, Model, Split, Weight, kinds, times

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UTILISATION = 0.92
"""vLLM 0.30's own --gpu-memory-utilization."""
BLOCK_TOKENS = 16
_CONTEXT_BYTES = int(0.75 * GIB)  # CUDA context, libraries, cuBLAS workspaces
_GRAPH_BYTES = int(1.0 * GIB)
_COLLECTIVE_BYTES = int(1.5 * GIB)  # NCCL, custom all-reduce and their buffers
_ROWS_IN_FLIGHT = 8
"""Rows of the hidden size that are alive at once in a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one worker's engine is distributed over GPUs."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    nodes: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The engine's settings; None where vLLM has a default that depends on the GPU."""

    utilisation: float = UTILISATION
    max_len: int | None = None
    average_len: int = 4096
    max_batched_tokens: int | None = None
    max_seqs: int | None = None
    cache_dtype: str = "auto"
    concurrency: int | None = None
    reserve_gib: float | None = None
    has_windows: bool = True
    """False where a KV connector makes vLLM keep all tokens of every layer."""
    eager: bool = False

    def batched_tokens(self, gpu: Gpu) -> int:
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        if gpu.gib >= 160:
            return 16384
        return 8192 if gpu.has_large_batches else 2048

    def seqs(self, gpu: Gpu) -> int:
        if self.max_seqs is not None:
            return self.max_seqs
        return 1024 if gpu.has_large_batches else 256

    def length(self, model: Model) -> int:
        return self.max_len or model.max_len

    def average(self, model: Model) -> int:
        return min(self.average_len, self.length(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One GPU of a layout, in bytes: the one with the least room."""

    layout: Layout
    total: int
    """The engine's share of the GPU's memory."""
    weights: int
    reserve: int
    cache_per_token: int
    """At the longest request, for layers with windows less than for short ones."""
    room: int
    """For KV caches; negative where the weights alone are too big."""
    requests_of_max_len: float
    """At once, in all data parallel ranks together."""
    requests_of_average_len: float
    tokens: int
    """Of KV cache in all ranks together, in requests of the longest kind."""
    problem: str | None
    """Why it does not fit."""

    @property
    def fits(self) -> bool:
        return self.problem is None


# --- weights --------------------------------------------------------------------------------------------


def stages(layers: int, count: int) -> list[int]:
    """Layers of each pipeline stage, distributed as vLLM does: the rest goes to those before the last."""
    sizes = [layers // count] * count
    for index in range(2, layers % count + 2):
        sizes[-index] += 1
    return sizes


def weight_bytes(model: Model, form: WeightFormat) -> int:
    """Of the whole model, as on disk."""
    return math.ceil(sum(form.bytes_of(weight) for weight in model.weights))


def rank_bytes(model: Model, form: WeightFormat, layout: Layout) -> list[int]:
    """On a GPU of each pipeline stage."""
    found, start = [], 0
    for stage, size in enumerate(stages(len(model.layers), layout.pp)):
        here = kinds(model.layers[start : start + size])
        held = [weight for layer, count in here for weight in times(layer.weights, count)]
        start += size
        is_first, is_last = stage == 0, stage == layout.pp - 1
        held += [*model.embeddings, *model.vision] if is_first else []
        held += model.ending if is_last else []
        if is_last and not is_first and model.is_tied:
            held += model.embeddings
        found.append(_held_bytes(held, form, layout, model))
    return found


def _held_bytes(weights: Iterable[Weight], form: WeightFormat, layout: Layout, model: Model) -> int:
    ranks = layout.tp * layout.dp
    # Whole experts, so that some GPU may have one more than others; otherwise slices of all.
    whole = layout.ep and model.is_moe
    shares = {
        Split.WHOLE: 1.0,
        Split.SHARDS: layout.tp,
        Split.KV_HEADS: min(layout.tp, model.kv_heads),
        Split.EXPERTS: model.experts / math.ceil(model.experts / ranks) if whole else ranks,
    }
    padded = {Split.EXPERTS: _padding(model, form, 1 if whole else ranks)}
    return math.ceil(
        sum(
            (form.bytes_of(w) * padded.get(w.split, 1.0) + form.copy_bytes_of(w)) / shares[w.split]
            for w in weights
        )
    )


def _padding(model: Model, form: WeightFormat, slices: int) -> float:
    """Return expert sizes after padding by kernels: rows and columns of each slice."""
    if not model.is_moe or form.padded_rows == form.padded_columns == 1:
        return 1.0
    width = math.ceil(model.expert_width / slices)
    rows = math.ceil(model.hidden / form.padded_rows) * form.padded_rows
    columns = math.ceil(width / form.padded_columns) * form.padded_columns
    return rows * columns * slices / (model.hidden * model.expert_width)


# --- caches ---------------------------------------------------------------------------------------------


def cache_value_bytes(form: WeightFormat, cache_dtype: str) -> int:
    if cache_dtype not in CACHE_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {cache_dtype} is unknown; use one of {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[cache_dtype] or form.value_bytes


def token_bytes(layers: Sequence[Layer], value_bytes: int, tp: int = 1) -> int:
    """What one token takes in all of `layers` on one rank, while every window still sees it."""
    return sum(layer.cache.values(tp) * count for layer, count in kinds(layers)) * value_bytes


def request_bytes(layers: Sequence[Layer], value_bytes: int, tp: int, tokens: int, in_flight: int) -> int:
    """Return the most that a request of so many tokens takes: windows drop what no step needs any more."""
    found = 0
    for layer, count in kinds(layers):
        blocks = math.ceil(tokens / BLOCK_TOKENS)
        if layer.cache.window is not None:
            # As vLLM 0.30 admits requests: the window, what steps add, and a block that begins before it.
            seen = min(layer.cache.window - 1 + in_flight, tokens)
            blocks = min(blocks, math.ceil(seen / BLOCK_TOKENS) + 1)
        found += count * blocks * BLOCK_TOKENS * layer.cache.values(tp) * value_bytes
    return found


# --- what a step needs ----------------------------------------------------------------------------------


def reserve_bytes(model: Model, form: WeightFormat, layout: Layout, load: EngineLoad, gpu: Gpu) -> int:
    """Estimate what vLLM measures at its start: activations, logits, graphs, libraries."""
    if load.reserve_gib is not None:
        return int(load.reserve_gib * GIB)
    tokens, seqs = load.batched_tokens(gpu), load.seqs(gpu)
    widths = [3 * width // layout.tp for width in model.widths]
    rows = _ROWS_IN_FLIGHT * model.hidden + max(widths, default=0)
    activations = tokens * rows * form.value_bytes
    if model.is_moe:
        # Each token stands once per chosen expert, between two products; data parallel ranks gather all
        # tokens of a step, of which each computes the rows of its own experts.
        per_row = model.hidden + 3 * model.expert_width // (1 if layout.ep else layout.tp * layout.dp)
        mine = model.chosen_experts * tokens * layout.dp / (layout.tp * layout.dp if layout.ep else 1)
        gathered = 2 * tokens * layout.dp * model.hidden if layout.dp > 1 else 0
        activations += int((mine * per_row + gathered) * form.value_bytes)
    # As they are, and in float32: scaled, with penalties, as probabilities, and the noise to draw by.
    logits = min(seqs, tokens) * model.vocabulary * (form.value_bytes + 4 * 4) * model.has_cache
    graphs = 0 if load.eager else _GRAPH_BYTES
    collectives = _COLLECTIVE_BYTES if layout.gpus > 1 else 0
    return _CONTEXT_BYTES + graphs + collectives + activations + logits


# --- together -------------------------------------------------------------------------------------------


def need(model: Model, form: WeightFormat, layout: Layout, gpu: Gpu, load: EngineLoad) -> Need:
    """Return what the fullest GPU of a layout holds, and what fits beside it."""
    layers = model.layers if load.has_windows else without_windows(model)
    total, reserve = int(gpu.gib * GIB * load.utilisation), reserve_bytes(model, form, layout, load, gpu)
    value = cache_value_bytes(form, load.cache_dtype)
    length, average = load.length(model), load.average(model)
    # Steps overlap: memory of the previous one may not be free yet.
    in_flight = (layout.pp + 1) * load.batched_tokens(gpu)
    weights = rank_bytes(model, form, layout)
    longest, usual, per_token, start = math.inf, math.inf, 0, 0
    for held, size in zip(weights, stages(len(layers), layout.pp), strict=True):
        stage = layers[start : start + size]
        start += size
        room = max(0, total - held - reserve)
        at_length, usually = (
            request_bytes(stage, value, layout.tp, tokens, in_flight) for tokens in (length, average)
        )
        # Without a cache the scheduler alone limits them.
        longest = min(longest, room / at_length if at_length else load.seqs(gpu))
        usual = min(usual, room / usually if usually else load.seqs(gpu))
        per_token = max(per_token, math.ceil(at_length / length))
    room = total - max(weights) - reserve
    found = Need(
        layout=layout,
        total=total,
        weights=max(weights),
        reserve=reserve,
        cache_per_token=per_token,
        room=room,
        requests_of_max_len=longest * layout.dp,
        requests_of_average_len=usual * layout.dp,
        tokens=int(longest * length) * layout.dp if per_token else 0,
        problem=None,
    )
    return dataclasses.replace(
        found, problem=refusal(model, form, layout) or _too_small(found, load, longest)
    )


def without_windows(model: Model) -> tuple[Layer, ...]:
    whole = {
        id(layer): dataclasses.replace(layer, cache=dataclasses.replace(layer.cache, window=None))
        for layer, _ in kinds(model.layers)
    }
    return tuple(whole[id(layer)] for layer in model.layers)


def _too_small(found: Need, load: EngineLoad, longest: float) -> str | None:
    if found.room <= 0:
        return f"too big by {-found.room / GIB:.1f} GiB per GPU"
    if longest < 1:
        return f"room for {longest:.2f} requests of the longest kind; lower --max-model-len"
    if load.concurrency is not None and found.requests_of_average_len < load.concurrency:
        return f"{int(found.requests_of_average_len)} requests at once, not {load.concurrency}"
    return None


def refusal(model: Model, form: WeightFormat, layout: Layout) -> str | None:
    """Return why an engine would not start with this layout, whatever its memory."""
    tp, all_ranks = layout.tp, layout.tp * layout.dp
    if model.heads % tp:
        return f"{model.heads} attention heads do not divide by {tp}"
    if model.kv_heads % tp and tp % model.kv_heads:
        return f"{model.kv_heads} KV heads and {tp} ranks do not divide"
    if layout.pp > len(model.layers):
        return f"{len(model.layers)} layers are fewer than {layout.pp} stages"
    if layout.ep and not model.is_moe:
        return "there are no experts to share out"
    if layout.ep and model.experts < all_ranks:
        return f"{model.experts} experts are fewer than {all_ranks} ranks"
    block = 1 if form.experts_only else form.block
    for width in model.widths:
        if width % (tp * block):
            return _uneven(width, tp, block)
    shards = 1 if layout.ep else all_ranks
    if model.is_moe and model.expert_width % (shards * form.block):
        return _uneven(model.expert_width, shards, form.block)
    return None


def _uneven(width: int, ranks: int, block: int) -> str:
    of = f" in blocks of {block}" if block > 1 else ""
    return f"an MLP of {width} does not divide by {ranks}{of}"
