"""Finds layouts of one engine that fit on up to so many GPUs, the fewest GPUs first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.sizing import memory
from dynamo_vllm.sizing.memory import EngineLoad, Layout, Need

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_vllm.sizing.formats import WeightFormat
    from dynamo_vllm.sizing.gpus import Gpu
    from dynamo_vllm.sizing.parts import Model

MAX_GPUS = 64
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Found:
    """Return the layouts that fit, and the nearest one that does not."""

    fits: tuple[Need, ...]
    nearest: Need | None


def search(
    model: Model, form: WeightFormat, gpu: Gpu, count: int, load: EngineLoad, per_node: int | None = None
) -> Found:
    """Return every layout of up to `count` GPUs, with tensor parallelism inside a node."""
    per_node = per_node or min(count, GPUS_PER_NODE)
    seen = [memory.need(model, form, layout, gpu, load) for layout in _all(model, form, count, per_node)]
    fits = sorted((need for need in seen if need.fits), key=_rank)
    rest = sorted((need for need in seen if not need.fits), key=lambda need: (-need.room, need.layout.gpus))
    return Found(tuple(fits), rest[0] if rest else None)


def smallest(model: Model, form: WeightFormat, gpu: Gpu, load: EngineLoad) -> Need | None:
    """Return the fewest GPUs of a type that hold the model."""
    count = 1
    while count <= MAX_GPUS:
        if found := search(model, form, gpu, count, load).fits:
            return found[0]
        count *= 2
    return None


def _rank(need: Need) -> tuple[float, ...]:
    """Order by fewest GPUs, fewest nodes, no pipeline, then the most room for requests."""
    layout = need.layout
    return (layout.gpus, layout.nodes, layout.pp, -need.requests_of_average_len)


def _all(model: Model, form: WeightFormat, count: int, per_node: int) -> Iterator[Layout]:
    for tp in _powers(min(count, per_node)):
        for pp in _powers(count // tp):
            # Copies of a dense model are separate workers: ranks share only experts.
            for dp in _powers(count // (tp * pp)) if model.is_moe and pp == 1 else (1,):
                nodes = -(-tp * pp * dp // per_node)
                plain = Layout(tp=tp, pp=pp, dp=dp, nodes=nodes)
                spread = dataclasses.replace(plain, ep=True)
                if plain.gpus % nodes or plain.gpus_per_node % tp:
                    continue
                yield spread if dp > 1 or (model.is_moe and memory.refusal(model, form, plain)) else plain


def _powers(limit: int) -> Iterator[int]:
    number = 1
    while number <= limit:
        yield number
        number *= 2


def flags(layout: Layout) -> list[str]:
    """Return the flags for a worker."""
    found = []
    if layout.tp > 1:
        found += ["--tensor-parallel-size", str(layout.tp)]
    if layout.pp > 1:
        found += ["--pipeline-parallel-size", str(layout.pp)]
    if layout.dp > 1:
        found += ["--data-parallel-size", str(layout.dp)]
        if layout.nodes > 1:
            found += ["--data-parallel-size-local", str(layout.dp // layout.nodes)]
    elif layout.nodes > 1:
        found += ["--nnodes", str(layout.nodes)]
    return [*found, "--enable-expert-parallel"] if layout.ep else found
