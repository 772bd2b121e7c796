"""Writes the tables of outcomes, alone or into their page: one of attacks, one of faults."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from faults.scenario import Fault, Result


def _head(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


ATTACKS = _head("attack", "runs", "passed", "what was seen in the worst run", "measured")
_COUNTS = ("requests", "wrong texts", "tokens lost or doubled", "failed requests", "longest pause")
FAULTS = _head("fault", "runs", "passed", *_COUNTS, "recovered, p50 / max", "measured")
_ROW = re.compile(r"^\| `([\w-]+)`")


def tables(results: Sequence[Result]) -> str:
    parts = []
    for head in (ATTACKS, FAULTS):
        rows = [row(result) for result in results if head_of(result) is head]
        parts += ["\n".join([*head, *rows])] if rows else []
    return "\n\n".join(parts)


def head_of(result: Result) -> list[str]:
    return FAULTS if isinstance(result.scenario, Fault) else ATTACKS


def row(result: Result) -> str:
    scenario = result.scenario
    where = f"{platform.machine()}, {os.cpu_count()} cores"
    cells = (
        f"`{scenario.name}`: {scenario.what}",
        str(result.runs),
        str(result.passed),
        *(counted(result, scenario) if isinstance(scenario, Fault) else [result.worst]),
        f"{time.strftime('%Y-%m-%d')}, {where}",
    )
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def counted(result: Result, fault: Fault) -> list[str]:
    """The cells for the requests of all runs."""
    counts = result.counts
    if result.skipped is not None or not counts:
        return [result.worst, *[""] * 5]
    failed: Counter[str] = Counter()
    for one in counts:
        failed.update(one.failed)
    reasons = [f"{count} × {how}: {fault.explained.get(how, '?')}" for how, count in sorted(failed.items())]
    seconds = [one.recovered_seconds for one in counts if one.recovered_seconds is not None]
    recovered = f"{statistics.median(seconds):.1f} / {max(seconds):.1f} s" if seconds else "–"
    notes = [one.note for one in counts if one.note is not None]
    worst = f" ({max(notes, key=lambda note: note.figure)})" if notes else ""
    return [
        f"{sum(one.requests for one in counts)}{worst}",
        str(sum(one.wrong for one in counts)),
        str(sum(one.lost + one.doubled for one in counts)),
        "; ".join(reasons) or "0",
        f"{max(one.longest_pause for one in counts):.1f} s",
        recovered,
    ]


def write(path: Path, results: Sequence[Result], order: Sequence[str]) -> None:
    """Put these rows in the place of older ones with the same names; a scenario that is no more has none."""
    lines = path.read_text().splitlines()
    for head in (ATTACKS, FAULTS):
        begin = lines.index(head[0])
        end = begin + 2
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        rows = {name_of(line): line for line in lines[begin + 2 : end]}
        rows |= {
            result.scenario.name: row(result)
            for result in results
            if result.skipped is None and head_of(result) is head
        }
        lines[begin:end] = [*head, *(rows[name] for name in order if name in rows)]
    path.write_text("\n".join(lines) + "\n")


def name_of(line: str) -> str:
    found = _ROW.match(line)
    assert found is not None, line
    return found[1]
