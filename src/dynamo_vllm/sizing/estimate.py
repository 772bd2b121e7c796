"""Estimates what a model needs in GPU memory: for one layout, or for all layouts that fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_vllm.sizing import layouts, memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.sizing.formats import WeightFormat
    from dynamo_vllm.sizing.gpus import Gpus
    from dynamo_vllm.sizing.layouts import Found
    from dynamo_vllm.sizing.memory import EngineLoad, Layout, Need
    from dynamo_vllm.sizing.parts import Model

ONLINE_QUANTISATION = {"fp8": "fp8_per_tensor", "fp8-block": "fp8_per_block"}
"""How vLLM 0.30 can quantise 16-bit files while it loads them, and its names for it."""


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """A model, how it is served, and the GPUs it is to fit on."""

    source: str
    model: Model
    form: WeightFormat
    load: EngineLoad
    gpus: Gpus | None
    layout: Layout | None
    nodes: int = 1
    dtype: str | None = None
    quantisation: str | None = None
    """The user's choice, if it differs from the file."""
    is_quantised: bool = False
    """Whether the files are quantised."""
    tiers: Mapping[str, float] = field(default_factory=dict)
    """Sizes in GB of tiers of KV caches: host memory, disk."""

    @property
    def online_quantisation(self) -> str | None:
        """vLLM's name for the quantisation that it applies while it loads; None if it applies none."""
        return None if self.is_quantised else ONLINE_QUANTISATION.get(self.quantisation or "none")


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The estimate for the requested layout, or the layouts that fit."""

    request: SizeRequest
    need: Need | None = None
    """What the requested layout needs."""
    found: Found | None = None
    """The layouts that fit, if none was requested."""

    @property
    def fits(self) -> bool:
        if self.need is not None:
            return self.need.fits
        return self.found is None or bool(self.found.fits)


def estimate(request: SizeRequest) -> SizeResult:
    """Estimate the memory of the requested layout, or search for layouts that fit."""
    available = request.gpus
    if available is None:
        return SizeResult(request)
    if request.layout is not None:
        need = memory.need(request.model, request.form, request.layout, available.gpu, request.load)
        return SizeResult(request, need)
    per_node = available.count // request.nodes if request.nodes > 1 else None
    found = layouts.search(
        request.model, request.form, available.gpu, available.count, request.load, per_node
    )
    return SizeResult(request, found=found)


def worker_flags(request: SizeRequest, layout: Layout) -> list[str]:
    """Return the flags of a worker with this layout and with the engine settings of the request."""
    load, found = request.load, layouts.flags(layout)
    given = {
        "--dtype": request.dtype,
        "--quantization": request.online_quantisation,
        "--max-model-len": load.max_len,
        "--max-num-batched-tokens": load.max_batched_tokens,
        "--max-num-seqs": load.max_seqs,
        "--kv-cache-dtype": None if load.cache_dtype == "auto" else load.cache_dtype,
        "--gpu-memory-utilization": None if load.utilisation == memory.UTILISATION else load.utilisation,
    }
    for name, value in given.items():
        found += [] if value is None else [name, str(value)]
    return [*found, "--enforce-eager"] if load.eager else found
