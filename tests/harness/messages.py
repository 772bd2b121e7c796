"""Messages that pages quote in tables: which pieces of them are fixed, and who says them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from docs_site import markdown, pages

PAGE = "docs/operations.md"
PAGES = (PAGE, "docs/errors.md", "docs/multimodal.md")
HEADS = ("you see", "message")
OURS, VLLM, RUNTIME = "", "†", "‡"
NOT_MESSAGES = re.compile(
    r"[45]\d\d|GET /.*|--[a-z-]+(?: [a-z]+)?|[A-Z]+(?: [A-Z]+)?|ok|length|status|serve|kv event"
    r"|check --live( URL)?"
)
"""Statuses, flags, columns and commands, which other tests look after or a reader knows."""
FROM_ELSEWHERE = {
    "No space left on device": "the kernel",
    "finish_reason": "OpenAI",
    "operator torchvision::nms does not exist": "torch",
}
_SPAN = re.compile(r"`([^`]+)`\s*([†‡]?)")
_FORMAT = re.compile(r"%[-+ 0-9.]*[sdrfxi]")


def text(page: str = PAGE) -> str:
    return (pages.ROOT / page).read_text()


def quoted(page: str) -> list[tuple[str, str]]:
    """Messages in the first column of tables with one of these heads, with the mark of who says them."""
    found = []
    is_inside = False
    for line in markdown.prose(page).splitlines():
        if not line.startswith("|"):
            is_inside = False
            continue
        first = re.split(r"(?<!\\)\|", line)[1]
        if first.strip() in HEADS:
            is_inside = True
        elif is_inside:
            found += [(text, mark) for text, mark in _SPAN.findall(first) if not NOT_MESSAGES.fullmatch(text)]
    return found


def pieces(message: str) -> list[str]:
    """What is between the ellipses, which stand for values; too short ones say nothing."""
    return [piece.strip() for piece in message.split("…") if len(piece.strip()) > 3]


@functools.cache
def own_strings() -> str:
    """Every string of our code, cut where a value goes in, one after another."""
    found: set[str] = set()
    for path in (Path(pages.ROOT) / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(_FORMAT.split(node.value))
    return "\0".join(found)


def is_ours(piece: str) -> bool:
    name = piece.removeprefix("dynamo_component_")  # which is put before the names of all series
    return name in own_strings()
