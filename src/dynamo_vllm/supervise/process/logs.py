"""Extracts the useful part of a log: the line with the reason, or the last meaningful lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MAX_BYTES = 256 * 1024
_NOISE = ("error: ", "Traceback (most recent call", "During handling of", "The above exception was")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "(EngineCore pid=1) ERROR 11-15 05:15:28 [core.py:100] " before the text of a vLLM line.
_VLLM_HEAD = re.compile(r"^(\(\w+ pid=\d+\) ?)?((ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
# The same of vLLM's, our own and the runtime's lines when nothing is wrong; and progress bars.
_ROUTINE = re.compile(r"^(\(\w+ pid=\d+\) ?)?INFO |^\S+Z +(INFO|DEBUG) |it/s\]|\?it/s")


def read_from(log: Path, start: int) -> str:
    """Return the log from `start` on, or its end if it is long; empty if somebody removed it."""
    try:
        with log.open("rb") as source:
            end = source.seek(0, 2)
            source.seek(max(start, end - _MAX_BYTES))
            return source.read().decode(errors="replace")
    except OSError:
        return ""


def error_line(text: str) -> str | None:
    """Return the reason in the last line that begins with 'error: '."""
    found = [line for line in text.splitlines() if line.startswith("error: ")]
    return found[-1].removeprefix("error: ").strip() if found else None


def last_lines(text: str, count: int = 15) -> list[str]:
    """Return the last lines about a problem, or the last lines if there are none."""
    lines = [_COLOURS.sub("", line).rstrip() for line in text.splitlines()]
    wrong = _informative(line for line in lines if not _ROUTINE.search(line))
    return (wrong or _informative(lines))[-count:]


def _informative(lines: Iterable[str]) -> list[str]:
    """Drop blank lines, repeats and the source code of tracebacks."""
    texts = (_VLLM_HEAD.sub("", line) for line in lines)
    informative = (text for text in texts if text and not text[0].isspace() and not text.startswith(_NOISE))
    return list(dict.fromkeys(informative))
