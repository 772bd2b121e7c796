"""The types that the parts of this package share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OnProgress = Callable[[int, int | None], None]
"""Bytes so far, and in total if known. Called from the thread that does the work."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NEEDED = (CONFIG, WEIGHTS)
"""The files that vLLM reads of an adapter; nothing else is downloaded."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter's files on this machine."""

    path: Path
    digest: str
    """Hash of the content: two adapters with the same digest are the same."""
    bytes: int


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The facts about an adapter that its files give."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Last part of the names of the modules it changes, sorted: q_proj, v_proj, …"""
    bytes: int
    base_name: str | None
    """The model it was made for, as its author named it."""
