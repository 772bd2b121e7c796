"""Which options are given, and which values their numbers may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.config.rules.flags import flag
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def values(options: object, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the flag and the value of each named option that is not None."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            yield flag(name), value


def given(options: object, names: Iterable[str]) -> list[str]:
    """Return the flags of those named options that are neither off nor empty."""
    return [name for name, value in values(options, names) if value]


def above_zero(options: object, *names: str) -> None:
    for name, value in values(options, names):
        if not 0 < value < float("inf"):  # nan is between nothing
            raise ConfigError(f"{name} {value} must be above 0")


def at_least(options: object, least: int, *names: str) -> None:
    for name, value in values(options, names):
        if not least <= value < float("inf"):
            finite = ", and finite" if isinstance(value, float) else ""
            raise ConfigError(f"{name} {value} must be {least} or more{finite}")
