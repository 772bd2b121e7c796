"""Computes ratios and tables from measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<!-- {name}:begin -->", "<!-- {name}:end -->"


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread | None:
        found = list(values)
        return Spread(statistics.median(found), min(found), max(found), len(found)) if found else None

    def show(self, digits: int = 2) -> str:
        shown = [f"{value:.{digits}f}" for value in (self.median, self.low, self.high)]
        return shown[0] if self.count == 1 else f"{shown[0]} ({shown[1]}–{shown[2]})"


@dataclass(frozen=True)
class Row:
    """One stage of one round on one peer."""

    round: int
    peer: str
    stage: str
    report: Mapping[str, Any]
    main: str
    """The label of the process whose CPU time per token is compared."""
    roots: tuple[str, ...]
    """Labels of the processes that together, with all below them, are the peer."""


@dataclass(frozen=True)
class Measure:
    name: str
    unit: str
    of: Callable[[Row], float | None]
    digits: int = 1
    more_is_better: bool = False


def _at(row: Row, *path: str) -> float | None:
    value: Any = row.report
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if value is not None else None


def _main_cpu(row: Row) -> float | None:
    return _at(row, "processes", row.main, "cpu_us_per_token")


def _all_cpu(row: Row) -> float | None:
    parts = [_at(row, "processes", label, "tree_cpu_us_per_token") for label in row.roots]
    known = [value for value in parts if value is not None]
    return sum(known) if known and len(known) == len(parts) else None


MEASURES = (
    Measure("tokens/s", "", lambda r: _at(r, "tokens", "output_per_second"), 0, more_is_better=True),
    Measure("TTFT p50", "ms", lambda r: _at(r, "ttft_ms", "p50")),
    Measure("TTFT p99", "ms", lambda r: _at(r, "ttft_ms", "p99")),
    Measure("ITL p50", "ms", lambda r: _at(r, "itl_ms", "p50"), 2),
    Measure("main process CPU", "µs/token", _main_cpu, 0),
    Measure("all CPU", "µs/token", _all_cpu, 0),
)
COMPARED = ("tokens/s", "TTFT p50", "main process CPU", "all CPU")


def by_stage(rows: Sequence[Row]) -> dict[str, list[Row]]:
    stages: dict[str, list[Row]] = {}
    for row in rows:
        stages.setdefault(row.stage, []).append(row)
    return stages


def peers_in(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.peer for row in rows))


def spread(rows: Sequence[Row], peer: str, measure: Measure) -> Spread | None:
    values = [measure.of(row) for row in rows if row.peer == peer]
    return Spread.of(value for value in values if value is not None)


def ratios(rows: Sequence[Row], ours: str, peer: str, measure: Measure) -> list[float]:
    """Return ours divided by the peer's, for each round with both, so that the machine's load cancels out."""
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        if (value := measure.of(row)) is not None:
            found[row.round, row.peer] = value
    rounds = sorted({number for number, _ in found})
    pairs = [(found.get((number, ours)), found.get((number, peer))) for number in rounds]
    return [a / b for a, b in pairs if a is not None and b]


# -- tables ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.head, tuple("---" for _ in self.head), *self.body]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    def text(self) -> str:
        rows = [self.head, *self.body]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.head))]
        shown = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([shown[0], "-" * len(shown[0]), *shown[1:]])


def values_table(rows: Sequence[Row], titles: Mapping[str, str]) -> Table:
    """Return the figures of one stage, a line per peer."""
    shown = [m for m in MEASURES if any(m.of(row) is not None for row in rows)]
    head = ("", *(f"{m.name}, {m.unit}" if m.unit else m.name for m in shown))
    body = []
    for peer in peers_in(rows):
        spreads = [(m, spread(rows, peer, m)) for m in shown]
        body.append((titles.get(peer, peer), *(s.show(m.digits) if s else "–" for m, s in spreads)))
    return Table(head, tuple(body))


def ratio_table(rows: Sequence[Row], ours: str, titles: Mapping[str, str]) -> Table:
    """Return ours divided by each peer's, a line per stage and peer."""
    shown = [m for m in MEASURES if m.name in COMPARED]
    body = []
    for stage, found in by_stage(rows).items():
        for peer in peers_in(found):
            if peer == ours or ours not in peers_in(found):
                continue
            spreads = [Spread.of(ratios(found, ours, peer, m)) for m in shown]
            body.append((f"{stage}, {titles.get(peer, peer)}", *(s.show() if s else "–" for s in spreads)))
    wish = {True: "more is better", False: "less is better"}
    head = ("ours / peer", *(f"{m.name} ({wish[m.more_is_better]})" for m in shown))
    return Table(head, tuple(body))


def seconds_table(seconds: Mapping[str, Sequence[float]]) -> Table:
    """Return the table of cold starts."""
    body = []
    for title, values in seconds.items():
        found = Spread.of(values)
        body.append((title, found.show(1) if found else "–", str(len(values))))
    return Table(("", "seconds to the first answer", "starts"), tuple(body))


# -- pages -------------------------------------------------------------------------------------------


def between_markers(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers replaced; missing markers are added at its end."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    block = f"{begin}\n{text.strip()}\n{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n{block}\n".lstrip()
    before, _, rest = page.partition(begin)
    if end not in rest:
        raise ValueError(f"the page has {begin} without {end}; add it where the tables end")
    return before + block + rest.partition(end)[2]


def differing(answers: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each peer whose greedy answers differ from those of the first one."""
    lines = []
    (first, wanted), *others = answers.items() or [("", [])]
    for peer, got in others:
        for number, (a, b) in enumerate(zip(wanted, got, strict=True), start=1):
            if a != b:
                lines.append(f"prompt {number}: {first} says {a!r}, {peer} says {b!r}")
    return lines
