"""Describes what keeps two engines from reading each other's KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.job import Terms

_WIDTH = "tensor_parallel_size"


def differences(here: Terms, there: Terms) -> list[str]:
    """Return one phrase per setting that does not match; none if they are compatible."""
    names = [name for name in {**here, **there} if name != _WIDTH]
    found = [_phrase(name, here, there) for name in names if here.get(name) != there.get(name)]
    if not _widths_fit(here.get(_WIDTH, 1), there.get(_WIDTH, 1)):
        found.append(_phrase(_WIDTH, here, there) + " (one must be a multiple of the other)")
    return found


def _phrase(name: str, here: Terms, there: Terms) -> str:
    return f"{name} is {here.get(name, 'unknown')} here and {there.get(name, 'unknown')} there"


def _widths_fit(here: str | int, there: str | int) -> bool:
    """A rank reads whole ranks of the other side, or an equal part of one."""
    if not (isinstance(here, int) and isinstance(there, int) and min(here, there) > 0):
        return False
    return max(here, there) % min(here, there) == 0
