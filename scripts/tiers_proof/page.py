"""Writes the table of outcomes in Markdown: `python -m tiers_proof.page FILE…` of one machine or several.

`equal: 63 / 9,152` stands for 63 answers, for which 9,152 tokens came from the tier.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tiers_proof import rows
from tiers_proof.cases import BY_NAME
from tiers_proof.rows import Row, Table

_NAMES = {"late-host": "host", "small-host": "host", "late-disk": "disk"}
"""What readers call these tiers. Only the way in which a CPU copies differs."""


def page(tables: Sequence[Table]) -> str:
    """A later row of the same case and tier stands for the earlier one."""
    found: dict[tuple[str, str], Row] = {}
    for table in tables:
        for row in table.rows:
            found[_column(table, row), row.case] = row
    columns = sorted(dict.fromkeys(column for column, _ in found), key=_is_broken)
    cases = [name for name in BY_NAME if any((column, name) in found for column in columns)]
    lines = [f"| case | what | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for case in cases:
        cells = [_cell(found.get((column, case))) for column in columns]
        lines.append(f"| `{case}` | {BY_NAME[case].what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _column(table: Table, row: Row) -> str:
    return f"{table.machine}, {_NAMES.get(row.tier, row.tier)}"


def _is_broken(column: str) -> bool:
    return "broken:" in column


def _cell(row: Row | None) -> str:
    if row is None:
        return "—"
    if row.outcome is None or row.verdict == "noticed":
        return row.verdict
    return f"{row.verdict}: {row.outcome.requests} / {row.outcome.loaded:,}"


if __name__ == "__main__":
    print(page([rows.load(Path(name)) for name in sys.argv[1:]]))
