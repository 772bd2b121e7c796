"""Reads the hand-written questions and says which are trained on and which are held out.

A hash of a question's words decides, so nobody chooses which are held out, and the choice does not change
when others are added.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from demo.search.passages import path_of

FILE = Path(__file__).parent / "questions.txt"
LATER = Path(__file__).parent / "later.txt"
"""Questions that were written after everything that is trained on; all are held out."""
HELD_OUT = 0.26
_WORDS = re.compile(r"[^\w]+")


@dataclass(frozen=True)
class Question:
    text: str
    pages: tuple[str, ...]
    """The right ones, the best first."""

    @property
    def is_held_out(self) -> bool:
        return share(self.text) < HELD_OUT


def normal(text: str) -> str:
    """Return the words alone: no capitals, no punctuation."""
    return " ".join(_WORDS.sub(" ", text.lower()).split())


def share(text: str) -> float:
    """Return a number from 0 to 1 that belongs to these words."""
    digest = hashlib.sha256(normal(text).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def read(file: Path = FILE) -> list[Question]:
    found, page = [], ""
    for line in map(str.strip, file.read_text(encoding="utf-8").splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            page = line.strip("[]")
            continue
        text, _, others = line.partition(" | ")
        names = [page, *(name.strip() for name in others.split(",") if name.strip())]
        found.append(Question(text, tuple(map(path_of, names))))
    return found


def trained(questions: Iterable[Question]) -> list[Question]:
    return [one for one in questions if not one.is_held_out]


def held_out(questions: Iterable[Question]) -> list[Question]:
    return [one for one in questions if one.is_held_out]
