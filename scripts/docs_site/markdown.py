"""Finds the parts of a Markdown page: fenced blocks, headings with anchors, links, inline code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<language>[^`]*)$")
_HEADING = re.compile(r"^(#{1,6}) +(.+?)(?: +#+)?$")
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"(?P<head>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()(?P<target>[^()\s]*)(?P<tail>[^()]*\))")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    line: int
    """The number of its first line, counted from 1."""
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [part for part in parts(page) if isinstance(part, Block)]


def prose(page: str) -> str:
    """Return the page without its fenced blocks and comments; line numbers stay the same."""
    lines: list[str] = []
    for part in parts(page):
        lines += [""] * (part.text.count("\n") + 3) if isinstance(part, Block) else [part]
    return _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), "\n".join(lines))


def parts(page: str) -> Iterator[Block | str]:
    """Yield the fenced blocks, and every line outside of them."""
    lines = enumerate(page.splitlines(), 1)
    for number, line in lines:
        if not (opened := _FENCE.match(line)):
            yield line
            continue
        inside = []
        for _, line in lines:
            closed = _FENCE.match(line)
            if closed and closed["mark"].startswith(opened["mark"]) and not closed["language"].strip():
                break
            inside.append(line.removeprefix(opened["indent"]))
        yield Block(number + 1, opened["language"].strip(), "\n".join(inside))


def title(page: str) -> str | None:
    """Return the first heading."""
    found = (_HEADING.match(part) for part in parts(page) if isinstance(part, str))
    return next((match[2] for match in found if match), None)


def anchors(page: str) -> set[str]:
    """Return the anchors of the page, named as code hosts do."""
    found: set[str] = set()
    for part in parts(page):
        if isinstance(part, str) and (heading := _HEADING.match(part)):
            slug, number = _slug(heading[2]), 0
            while (name := f"{slug}-{number}" if number else slug) in found:
                number += 1
            found.add(name)
    return found


def _slug(heading: str) -> str:
    text = _LINK.sub(lambda match: match["head"].strip("!")[1:-2], heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def links(page: str) -> list[tuple[int, str]]:
    """Return line and target of every link and image outside of code."""
    found = []
    for number, line in enumerate(prose(page).splitlines(), 1):
        found += [(number, match["target"]) for match in _LINK.finditer(_CODE.sub(_blank, line))]
    return found


def code(page: str) -> list[tuple[int, str]]:
    """Return line and text of every piece of inline code."""
    found = []
    for number, line in enumerate(prose(page).splitlines(), 1):
        found += [(number, match[2].replace("\\|", "|").strip()) for match in _CODE.finditer(line)]
    return found


def with_links(page: str, change: Mapping[str, str | None]) -> str:
    """Return the page with some link targets replaced; a link to None becomes plain text."""

    def changed(match: re.Match[str]) -> str:
        target = change.get(match["target"], match["target"])
        return match["head"][1:-2] if target is None else match["head"] + target + match["tail"]

    lines = page.splitlines()
    for number, line in enumerate(prose(page).splitlines()):
        if any(match["target"] in change for match in _LINK.finditer(line)):
            lines[number] = _LINK.sub(changed, lines[number])
    return "\n".join(lines) + "\n"


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])
