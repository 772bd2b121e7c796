"""Formats numbers with their units."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float | None) -> str:
    """Format a number of bytes."""
    if count is None:
        return "?"
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == UNITS[0] else f"{count:.1f} {unit}"
