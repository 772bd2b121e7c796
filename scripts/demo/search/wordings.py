"""Says a question in other words: other openings, synonyms, words left out or swapped."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from random import Random

FILE = Path(__file__).parent / "synonyms.txt"
MAX_WORDS = 3
"""Of an entry of a group of synonyms."""

TASKS = (
    "how do i {}", "how can i {}", "how to {}", "how do you {}", "how does one {}", "i want to {}",
    "i need to {}",
    "is it possible to {}", "can i {}", "what must i do to {}", "which command do i need to {}",
    "how would i {}",
    "which page tells me how to {}", "where is explained how to {}", "what is the way to {}",
    "please help me {}", "{}",
)  # fmt: skip
THINGS = (
    "what is {}", "what are {}", "explain {}", "tell me about {}", "what about {}", "{}", "{}",
    "meaning of {}",
    "which page tells me about {}", "where do i read about {}", "i have a question about {}", "more about {}",
    "documentation of {}", "what do i need to know about {}", "how does {} work", "show me {}",
    "help with {}",
    "information about {}", "where is {} described", "give me details of {}", "what does {} mean",
)  # fmt: skip
_OPENINGS = tuple(
    (re.compile(rf"^(?:{words})\s+(.+?)\??$", re.IGNORECASE), frames)
    for words, frames in (
        (r"how do i|how can i|how should i|how do you|can i|how to", TASKS),
        (
            r"what is|what are|what's|tell me about|explain|what does(?= .+ mean)|which(?= .+ are there)",
            THINGS,
        ),
    )
)
_TAILS = re.compile(r"\s+(?:mean|are there)$")
_FILLERS = """
a an the is are was were be do does did i my me you it its of to in on at for with and or by from how what
which who why when where can may must should there that this these those if as one some any have has
"""
FILLERS = frozenset(_FILLERS.split())
_WORD = re.compile(r"[\w.'/-]+")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def told_otherwise(text: str, source: Random) -> str:
    """Return the question in other words; sometimes it stays as it is."""
    text = _opened_otherwise(text, source) if source.random() < 0.5 else text
    words = words_of(text)
    if source.random() < 0.6:
        words = with_synonyms(words, source, 0.3)
    chance = source.random()
    if chance < 0.2:
        words = [word for word in words if word not in FILLERS] or words
    if chance < 0.55:
        words = without_some(words, source, 0.15)
    if source.random() < 0.15 and len(words) > 2:
        at = source.randrange(len(words) - 1)
        words[at], words[at + 1] = words[at + 1], words[at]
    return " ".join(words)


def _opened_otherwise(text: str, source: Random) -> str:
    for opening, frames in _OPENINGS:
        if found := opening.match(text):
            return source.choice(frames).format(_TAILS.sub("", found[1]))
    if not text.endswith("?") and len(text.split()) < 7:
        return source.choice(THINGS).format(text)
    return text


def without_some(words: list[str], source: Random, share: float) -> list[str]:
    kept = [word for word in words if source.random() >= share]
    return kept or words


def with_synonyms(words: list[str], source: Random, share: float) -> list[str]:
    """Replace some words, or runs of words, by others of their group."""
    groups = synonyms()
    result: list[str] = []
    at = 0
    while at < len(words):
        for length in range(min(MAX_WORDS, len(words) - at), 0, -1):
            found = groups.get(" ".join(words[at : at + length]))
            if found and source.random() < share:
                result += source.choice(found).split()
                at += length
                break
        else:
            result.append(words[at])
            at += 1
    return result


@cache
def synonyms() -> dict[str, list[str]]:
    """Return by entry the others of its groups."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        group = [entry.strip() for entry in line.split(",") if entry.strip()]
        for entry in group:
            found[entry] += [other for other in group if other != entry]
    return dict(found)
