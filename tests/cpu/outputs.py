"""Makes the outputs of an engine with and without direct egress comparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def one_by_one(outputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Splits outputs into one per token: on a busy machine vLLM returns several at once.

    Cached tokens count in the last one, as in a client's usage.
    """
    found: list[dict[str, Any]] = []
    for output in outputs:
        tokens = output["token_ids"]
        early = {**output, "finish": None, "stop_reason": None, "finished": False}
        found += [{**early, "token_ids": [token]} for token in tokens[:-1]]
        found.append({**output, "token_ids": tokens[-1:]})
    return [{**output, "cached_tokens": None} for output in found[:-1]] + found[-1:]
