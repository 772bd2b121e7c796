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


def ago(seconds: float) -> str:
    """Format a duration in the largest unit that gives at least 2."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
