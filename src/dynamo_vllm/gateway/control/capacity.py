"""Asks the frontend how many requests the engines of the deployment can run at a time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

_SLOTS = re.compile(r"^\w+_model_max_num_seqs\{[^}]*\} (\S+)", re.MULTILINE)
_RANK = re.compile(r'^\w+_worker_active_decode_blocks\{[^}]*worker_type="decode"\} ', re.MULTILINE)


async def slots(frontend: httpx.AsyncClient) -> float | None:
    """Return the slots of all workers; None if the frontend does not say."""
    reply = await frontend.get("/metrics", timeout=5.0)
    return read(reply.text) if reply.status_code == 200 else None


def read(metrics: str) -> float | None:
    """The frontend names the slots of a worker by model, and all ranks, but not which has which model."""
    by_model = [float(found) for found in _SLOTS.findall(metrics)]
    ranks = len(_RANK.findall(metrics))
    if not by_model or not ranks:
        return None
    return max(ranks, len(by_model)) * sum(by_model) / len(by_model)
