"""Reads the texts that `dynamo-vllm search` looks in: our documentation, or a folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.models import demo

if TYPE_CHECKING:
    from collections.abc import Iterator

CHARACTERS = 600
"""Of a passage: about 150 tokens, which every embedding model takes."""
MOST_FILES, MOST_PASSAGES = 5000, 20000
ENDINGS = (".md", ".txt")
FILE = "passages.json"
_HEADING = re.compile(r"^#{1,4} +(.+?) *#*$")


@dataclass(frozen=True, slots=True)
class Passage:
    page: str
    title: str
    """The headings above the text."""
    text: str

    @property
    def whole(self) -> str:
        """What models read."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read(folder: str | None) -> list[Passage]:
    """Return the passages of a folder, or those of the documentation, which are beside demo-embed."""
    if folder is not None:
        return of_folder(Path(folder))
    file = demo.ROOT / "embed" / FILE
    try:
        return [Passage(**one) for one in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError):
        raise ConfigError(
            f"the passages of the documentation are not in {file}; name a folder of texts with --folder"
        ) from None


def of_folder(folder: Path) -> list[Passage]:
    if not folder.is_dir():
        raise ConfigError(f"--folder {folder}: there is no such folder")
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in ENDINGS and path.is_file()]
    if len(files) > MOST_FILES:
        raise ConfigError(f"--folder {folder} has {len(files)} texts; search takes {MOST_FILES}")
    found: list[Passage] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        found += cut(path.relative_to(folder).as_posix(), text)
    if not found:
        raise ConfigError(f"--folder {folder} has no text; search reads {' and '.join(ENDINGS)} files")
    if len(found) > MOST_PASSAGES:
        raise ConfigError(f"--folder {folder} has {len(found)} passages; search takes {MOST_PASSAGES}")
    return found


def cut(page: str, text: str) -> Iterator[Passage]:
    """Cut at headings, then between paragraphs and words, so that no passage is too long."""
    title, part = "", ""
    for block in _blocks(text):
        if found := _HEADING.match(block):
            if part:
                yield Passage(page, title, part)
            title, part = found[1], ""
            continue
        for piece in _pieces(block):
            if part and len(part) + len(piece) >= CHARACTERS:
                yield Passage(page, title, part)
                part = ""
            part = f"{part} {piece}" if part else piece
    if part:
        yield Passage(page, title, part)


def _blocks(text: str) -> Iterator[str]:
    """Yield paragraphs, each in one line; a heading is a paragraph of its own."""
    lines: list[str] = []
    is_code = False
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("```"):
            is_code = not is_code
            continue
        is_heading = not is_code and _HEADING.match(line) is not None
        if (is_heading or not line.strip()) and lines:
            yield " ".join(lines)
            lines = []
        if is_heading:
            yield line.strip()
        elif line.strip():
            lines.append(line.strip())


def _pieces(block: str) -> Iterator[str]:
    while len(block) > CHARACTERS:
        end = block.rfind(" ", 0, CHARACTERS)
        end = end if end > 0 else CHARACTERS
        yield block[:end]
        block = block[end:].strip()
    if block:
        yield block
