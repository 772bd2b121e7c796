"""Writes the table of outcomes, alone or into its page."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path

from faults.scenario import Result

HEAD = ["| scenario | runs | passed | what was seen in the worst run | measured |", "|---|---|---|---|---|"]
_ROW = re.compile(r"^\| `([\w-]+)`")


def table(results: Sequence[Result]) -> str:
    return "\n".join([*HEAD, *map(row, results)])


def row(result: Result) -> str:
    scenario = result.scenario
    when = time.strftime("%Y-%m-%d")
    where = f"{platform.machine()}, {os.cpu_count()} cores"
    cells = (
        f"`{scenario.name}`: {scenario.what}",
        str(result.runs),
        str(len(result.seen)),
        result.worst,
        f"{when}, {where}",
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def write(path: Path, results: Sequence[Result], order: Sequence[str]) -> None:
    """Put these rows in the place of older ones with the same names; a scenario that is no more has none."""
    lines = path.read_text().splitlines()
    begin = lines.index(HEAD[0])
    end = begin + 2
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    rows = {name_of(line): line for line in lines[begin + 2 : end]}
    rows |= {result.scenario.name: row(result) for result in results if result.skipped is None}
    lines[begin:end] = [*HEAD, *(rows[name] for name in order if name in rows)]
    path.write_text("\n".join(lines) + "\n")


def name_of(line: str) -> str:
    found = _ROW.match(line)
    assert found is not None, line
    return found[1]
