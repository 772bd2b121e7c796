"""Formats tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.observe.frontend_client import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with aligned columns."""
    cells = [[harmless(str(cell)) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
