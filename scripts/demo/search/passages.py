"""Cuts the documentation into passages: page, heading path and a piece of text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_CHARACTERS = 620
"""Of a passage's text: about 200 tokens with its title."""
MAX_PARTS = 4
"""Of one section."""
MAX_REFERENCE_PARTS = 1
"""Of one section of the pages that list every option; they say again what other pages say."""
REFERENCES = ("docs/cli.md", "docs/configuration.md", "docs/performance.md", "docs/bench.md")
MAX_DIGITS = 0.2
"""The share of digits above which a part is a table of figures, which nobody asks for in words."""
FILE = "passages.json"
MAX_BYTES = 480_000
"""Of that file."""

_FENCE = re.compile(r"^\s*```")
_HEADING = re.compile(r"^(#{1,4}) (.+)$")
_RULE = re.compile(r"^[|\s:-]+$")
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_DRAWING = re.compile(r"[─│┌┐└┘├┤┬┴┼▶◀▲▼]+")
_MARKS = re.compile(r"\*\*|`|<br>")
_BLANKS = re.compile(r"[ \t]+")


@dataclass(frozen=True)
class Passage:
    page: str
    """Path in the repository, such as docs/serve.md."""
    title: str
    """The headings above the text, outermost first."""
    text: str

    @property
    def whole(self) -> str:
        """What the models read."""
        return f"{self.title}\n{self.text}"


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the text of every page by its path."""
    files = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}


def path_of(name: str) -> str:
    """Return the path of a page that questions.txt calls by its short name."""
    return "README.md" if name == "README" else f"docs/{name}.md"


def read(root: Path = ROOT) -> list[Passage]:
    """Return all passages of the documentation, in order."""
    return [passage for page, text in pages(root).items() for passage in cut(page, text)]


def cut(page: str, text: str) -> Iterator[Passage]:
    """Yield the passages of one page."""
    for path, lines in _sections(_COMMENT.sub("", text)):
        parts = [one for one in _parts([line for line in map(plain, lines) if line]) if not _is_figures(one)]
        for part in parts[: MAX_REFERENCE_PARTS if page in REFERENCES else MAX_PARTS] or [""]:
            yield Passage(page, " > ".join(map(plain, path)), part)


def plain(line: str) -> str:
    """Return a line without marks, addresses of links and drawings."""
    if _RULE.match(line):
        return ""
    line = _LINK.sub(r"\1", _IMAGE.sub("", line))
    line = _MARKS.sub("", _DRAWING.sub(" ", line)).strip()
    if line.startswith("|"):
        cells = (cell.strip() for cell in line.strip("|").split("|"))
        line = "; ".join(cell for cell in cells if cell)
    return _BLANKS.sub(" ", line).strip()


def _sections(text: str) -> Iterator[tuple[list[str], list[str]]]:
    path: list[str] = []
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_code = not is_code
            continue
        found = None if is_code else _HEADING.match(line)
        if found is None:
            lines.append(line)
            continue
        if path:
            yield path, lines
        depth = len(found[1])
        path, lines = [*path[: depth - 1], found[2]], []
    if path:
        yield path, lines


def _parts(lines: list[str]) -> Iterator[str]:
    """Join lines up to the limit; a longer line is cut between words."""
    part = ""
    for line in lines:
        for piece in _pieces(line):
            if part and len(part) + 1 + len(piece) > MAX_CHARACTERS:
                yield part
                part = ""
            part = f"{part} {piece}" if part else piece
    if part:
        yield part


def _is_figures(text: str) -> bool:
    return sum(map(str.isdigit, text)) > MAX_DIGITS * len(text)


def _pieces(line: str) -> Iterator[str]:
    while len(line) > MAX_CHARACTERS:
        end = line.rfind(" ", 0, MAX_CHARACTERS)
        end = end if end > 0 else MAX_CHARACTERS
        yield line[:end]
        line = line[end:].strip()
    yield line


def write(passages: list[Passage], folder: Path) -> Path:
    """Write them beside the model, one per line."""
    rows = ",\n".join(json.dumps(asdict(one), ensure_ascii=False, separators=(",", ":")) for one in passages)
    data = f"[\n{rows}\n]\n".encode()
    if len(data) > MAX_BYTES:
        raise SystemExit(f"the passages have {len(data)} bytes; {MAX_BYTES} are allowed")
    file = folder / FILE
    file.write_bytes(data)
    return file


def load(folder: Path) -> list[Passage]:
    """Read what `write` wrote."""
    return [Passage(**one) for one in json.loads((folder / FILE).read_bytes())]
