"""Computes what the runtime's KV router (1.6.1) computes for each candidate; the least cost is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.console.decisions.shapes import Load, Overlap, Weights

AGGREGATED, PREFILL, DECODE = "agg", "prefill", "decode"


def cost(
    phase: str, weights: Weights, overlap: Overlap, load: Load, prompt_tokens: int, block_size: int
) -> float:
    """A prefill worker keeps no answers; a decode worker of a pair computes no prompts."""
    running = weights.request_blocks * load.requests
    if phase == DECODE:
        return load.blocks + running
    saved = weights.credit * overlap.device + weights.host * overlap.host + weights.disk * overlap.disk
    to_compute = (load.prefill_tokens + prompt_tokens) / block_size - saved
    kept = 0 if phase == PREFILL else load.blocks
    return weights.overlap * max(0.0, to_compute) + kept + running


def counted_blocks(weights: Weights, overlap: Overlap) -> float:
    """Return how many blocks the router says that a worker has cached: those of lower tiers count less."""
    return overlap.device + weights.host * overlap.host + weights.disk * overlap.disk
