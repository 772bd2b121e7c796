"""Defines a case of the proof: a model, vLLM's flags, and what is sent to one engine or to several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiers_proof.requests import Plan

BOTH, CPU, GPU = ("cpu", "cuda"), ("cpu",), ("cuda",)
TOLERANCES = {
    "cpu": {"float32": 1e-4, "float16": 1e-4, "bfloat16": 1e-4},
    "cuda": {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2},
}
"""The largest difference of log-probabilities that another order of a batch makes, and some more."""
WIDEST_TOLERANCE = 0.2
"""Up to which an engine without tiers may contradict itself: then the tolerance is as wide as that needs."""
GQA_BLOCK_BYTES, VISION_BLOCK_BYTES = 131_072, 32_768
"""A block of 32 tokens of these models in float32."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One engine of a case. Those after the first find what the earlier ones left on disk."""

    plan: Plan
    flags: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    """Other weights, in the same folder."""
    adapter_seed: int = 1
    """Another number is other content of the adapters, in the same folder."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    what: str
    lives: Sequence[Life]
    model: str = "gqa"
    flags: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    """Other flags on a GPU; None takes vLLM's default."""
    blocks: int = 28
    """The blocks of the engine's own cache: too few for all prompts."""
    gpu_blocks: int | None = None
    """The same on a GPU, where vLLM wants more for some layouts."""
    devices: Sequence[str] = BOTH
    by_worker: bool = False
    """Our own engine is asked, not vLLM's."""
    block_bytes: int | None = None
    """Of a block in float32; None asks the engine, which our own does not tell."""
    refused_on: Sequence[str] = ()
    """Devices on which tiers may be refused for it."""
    adapters: bool = False
    other_weights: bool = False
    """The weights change while the engine runs."""

    @property
    def is_for_disk(self) -> bool:
        """Whether host memory alone, which ends with its engine, shows nothing."""
        return len(self.lives) > 1

    @property
    def has_own_folder(self) -> bool:
        return self.other_weights or any(life.seed is not None for life in self.lives)

    def own_blocks(self, device: str) -> int:
        return self.gpu_blocks if device == "cuda" and self.gpu_blocks else self.blocks

    def size_of_block(self, life: int, device: str) -> int | None:
        is_wide = self.all_flags(life, device)["dtype"] == "float32"
        return self.block_bytes if is_wide or self.block_bytes is None else self.block_bytes // 2

    def all_flags(self, life: int, device: str) -> dict[str, Any]:
        more = self.on_gpu if device == "cuda" else {}
        given = {**DEFAULT_FLAGS, **self.flags, **more, **self.lives[life].flags}
        block = given["block_size"]
        found = {"max_model_len": 20 * block, "max_num_batched_tokens": 5 * block, **given}
        return {name: value for name, value in found.items() if value is not None}


DEFAULT_FLAGS: Mapping[str, Any] = {
    "enforce_eager": True,
    "max_num_seqs": 8,
    "dtype": "float32",
    "block_size": 32,
}
