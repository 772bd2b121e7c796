"""Writes the result of a run as text for the terminal and as a section of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers import figures, machine
from peers.contestants import titles
from peers.match import rows_of

OURS = "ours"
CELLS = (
    "order reversed in every other one. A cell is the median over the rounds, with the smallest and largest "
    "in brackets."
)
HEAD = """# Performance

Measured figures, each written by the command that its section names.
"""


def text(record: Mapping[str, Any]) -> str:
    """Return the tables for the terminal."""
    rows, named = rows_of(record), titles()
    parts = [
        f"{stage}\n{figures.values_table(found, named).text()}"
        for stage, found in figures.by_stage(rows).items()
    ]
    if rows:
        parts.append(f"ours over each peer, per round\n{figures.ratio_table(rows, OURS, named).text()}")
    if record["cold"]:
        parts.append(f"cold start\n{figures.seconds_table(cold_starts(record)).text()}")
    parts += [f"left out: {named.get(name, name)}: {reason}" for name, reason in record["missing"].items()]
    parts += [f"ANSWERS DIFFER: {line}" for line in figures.differing(record["answers"])]
    return "\n\n".join(parts)


def markdown(record: Mapping[str, Any]) -> str:
    """Return the section between the markers."""
    rows, named = rows_of(record), titles()
    setting = record["setting"]
    parts = [
        f"Written by `{record['command']}`. {machine.describe(record['machine'])}",
        f"{setting['text']} Rounds: {len({r.round for r in rows})}, {CELLS}",
    ]
    for stage, found in figures.by_stage(rows).items():
        parts += [f"### {stage}", figures.values_table(found, named).markdown()]
    if rows:
        parts += ["### Ours over each peer", figures.ratio_table(rows, OURS, named).markdown()]
    if record["cold"]:
        parts += ["### Cold start to the first answer", figures.seconds_table(cold_starts(record)).markdown()]
    if record["missing"]:
        lines = [f"- {named.get(name, name)}: {reason}" for name, reason in record["missing"].items()]
        parts += ["### Left out", "\n".join(lines)]
    if differ := figures.differing(record["answers"]):
        parts += ["### Answers differ", "\n".join(f"- {line}" for line in differ)]
    else:
        parts.append("The greedy answers of all were equal.")
    commands = [f"# {named[name]}\n" + "\n".join(peer["commands"]) for name, peer in record["peers"].items()]
    parts += ["### Commands", "```\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join(parts)


def cold_starts(record: Mapping[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for start in record["cold"]:
        found.setdefault(start["title"], []).append(start["seconds"])
    return found


def write(path: Path, name: str, section: str) -> None:
    page = path.read_text(encoding="utf-8") if path.exists() else HEAD
    path.write_text(figures.between_markers(page, name, section), encoding="utf-8")
