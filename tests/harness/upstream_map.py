"""Reads the tables of docs/from-dynamo-vllm.md: what upstream has, and in the last column what it is here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = "docs/from-dynamo-vllm.md"
_CODE = re.compile(r"`([^`]+)`")
_ROW = re.compile(r"^\|(.+)\|$")


@dataclass(frozen=True)
class Row:
    section: str
    line: int
    upstream: tuple[str, ...]
    """Names in the first column."""
    variables: tuple[str, ...]
    """Those in the second of three."""
    here: str

    @property
    def named_here(self) -> list[str]:
        return _CODE.findall(self.here)

    def __str__(self) -> str:
        return f"{self.line}-{self.upstream[0]}"


def text() -> str:
    return (Path(__file__).parents[2] / PAGE).read_text()


def rows(section: str) -> list[Row]:
    """The rows of a section's tables, without their heads."""
    found, here = [], ""
    for number, line in enumerate(text().splitlines(), 1):
        if line.startswith("## "):
            here = line.removeprefix("## ")
        cells = _cells(line)
        if here == section and cells and cells[0].startswith("`"):
            first, *middle, last = cells
            variables = tuple(_CODE.findall(middle[0])) if middle else ()
            found.append(Row(section, number, tuple(_CODE.findall(first)), variables, last))
    return found


def without_upstream(page: str) -> str:
    """The page with the last column of its tables only: what we say of ourselves."""
    kept = []
    for line in page.splitlines():
        cells = _cells(line)
        kept.append(f"| {cells[-1]} |" if cells else line)
    return "\n".join(kept)


def _cells(line: str) -> list[str]:
    found = _ROW.match(line)
    return [cell.strip() for cell in found[1].split(" | ")] if found else []
