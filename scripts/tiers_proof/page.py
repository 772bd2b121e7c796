"""Writes the table of outcomes in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiers_proof.run import Row


def table(rows: Sequence[Row]) -> str:
    tiers = list(dict.fromkeys(row.tier for row in rows))
    cases = list(dict.fromkeys(row.case for row in rows))
    found = {(row.case, row.tier): row for row in rows}
    lines = [f"| case | {' | '.join(tiers)} |", "|---|" + "---|" * len(tiers)]
    for case in cases:
        cells = [_cell(found.get((case, tier))) for tier in tiers]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row.outcome is None:
        return f"{row.verdict}: {row.reason[:80]}"
    return f"{row.verdict}: {row.outcome.requests} answers, {row.outcome.loaded} tokens"
