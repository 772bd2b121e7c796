"""Alternates rounds of a measurement and summarises them: medians, ranges, and ratios within a round."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Range(msgspec.Struct, frozen=True):
    """The median, the smallest and the largest value of several rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 2 if abs(self.median) < 10 else 1 if abs(self.median) < 100 else 0
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Range:
    return Range(statistics.median(values), min(values), max(values))


def ratios(above: Sequence[float], below: Sequence[float]) -> Range | None:
    """Return the ratios within each round, where the machine's load affects both; None if a divisor is 0."""
    if not all(below):
        return None
    return spread([a / b for a, b in zip(above, below, strict=True)])


def alternating(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield every name once in each round, in order and in reverse order by turns."""
    for number in range(rounds):
        for name in names if number % 2 == 0 else tuple(reversed(names)):
            yield number, name


def print_line(text: str) -> None:
    """Print a line without delay, also if standard output is a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def json_file(path: str | None) -> Path | None:
    """Return the file for the figures. An error is raised now, not after an hour of load."""
    if path is None:
        return None
    file = Path(path)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--json {file} cannot be written; its folder must exist and it must be a file")
    return file


def write_json(file: Path | None, value: dict[str, object]) -> None:
    if file is not None:
        write(file, (json.dumps(msgspec.to_builtins(value), indent=1) + "\n").encode())


def write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as exc:
        raise StartError(f"--json {file} cannot be written: {exc.strerror}") from None
