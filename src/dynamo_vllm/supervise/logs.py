"""What a person needs to see of a log: the line that says why, or the last lines that say anything."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES = 256 * 1024
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "(EngineCore pid=1) ERROR 11-15 05:15:28 [core.py:100] " before the text of a line of vLLM.
_VLLM_HEAD = re.compile(r"^(\(\w+ pid=\d+\) ?)?((ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")


def read_from(log: Path, start: int) -> str:
    """The log from `start` on, or its end when it is long."""
    with log.open("rb") as source:
        end = source.seek(0, 2)
        source.seek(max(start, end - _MAX_BYTES))
        return source.read().decode(errors="replace")


def error_line(text: str) -> str | None:
    """The reason in the last line that begins with 'error: '."""
    found = [line for line in text.splitlines() if line.startswith("error: ")]
    return found[-1].removeprefix("error: ").strip() if found else None


def last_lines(text: str, count: int = 15) -> list[str]:
    """The last lines that tell something: no blanks, no repeats, no source code of tracebacks."""
    found: dict[str, None] = {}
    for raw in reversed(text.splitlines()):
        line = _VLLM_HEAD.sub("", _COLOURS.sub("", raw)).rstrip()
        if line and not line[0].isspace() and not line.startswith(("error: ", "Traceback (most recent")):
            found.setdefault(line)
        if len(found) == count:
            break
    return list(reversed(found))
