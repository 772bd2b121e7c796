"""Makes training questions: hand-written ones in other words, and ones made from the passages themselves."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from demo.generator.facts import FACTS
from demo.search.passages import Passage, path_of
from demo.search.questions import LATER, Question, held_out, normal, read, trained
from demo.search.wordings import FILLERS, TASKS, THINGS, told_otherwise, with_synonyms, without_some, words_of

TOPICS = Path(__file__).parent / "topics.txt"
_FLAG = re.compile(r"--[a-z][a-z-]+|\b[A-Z]{3,}_[A-Z_]+\b")
ABOUT_FLAGS = (
    "{}", "what does {} do", "{} option", "what is {}", "meaning of {}", "how do i use {}", "default of {}",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    text: str
    pages: frozenset[str]
    passage: int | None = None
    """Index of the passage that it was made from."""


def of_facts() -> list[Question]:
    """Return the questions that demo-chat is trained on, with their pages; English ones alone."""
    return [Question(text, (fact.page,)) for fact in FACTS for text in fact.wordings.train if text.isascii()]


def of_topics(file: Path = TOPICS) -> list[Question]:
    """Return what each page is about, phrase by phrase."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        page, _, phrases = line.partition(": ")
        if phrases and not line.startswith("#"):
            found += [Question(phrase.strip(), (path_of(page),)) for phrase in phrases.split(",")]
    return found


class Source:
    """Gives training questions; none of them is a held-out one, whatever its capitals and punctuation."""

    def __init__(self, passages: Sequence[Passage], questions: Sequence[Question], seed: int) -> None:
        self._passages = passages
        self._random = Random(seed)
        pages = {one.page for one in passages}
        self._unseen = {normal(one.text) for one in (*held_out(questions), *read(LATER))}
        asked = [*trained(questions), *of_topics(), *of_facts()]
        asked = [one for one in asked if set(one.pages) <= pages]
        self.questions = [one for one in asked if normal(one.text) not in self._unseen]
        self._by_page: dict[str, list[int]] = {}
        for index, passage in enumerate(passages):
            self._by_page.setdefault(passage.page, []).append(index)
        self._words = [[w for w in words_of(one.whole) if w not in FILLERS] for one in passages]
        counts = Counter(word for page in self._by_page.values() for word in self._distinct(page))
        self._rareness = {word: math.log(1 + len(self._by_page) / count) for word, count in counts.items()}

    def asked(self) -> Pair:
        """Return a hand-written question in other words."""
        while True:
            chosen = self._random.choice(self.questions)
            text = told_otherwise(chosen.text, self._random)
            if self._is_new(text):
                return Pair(text, frozenset(chosen.pages))

    def made(self) -> Pair:
        """Return a question made from a passage; every page is as likely as the others."""
        while True:
            page = self._random.choice(list(self._by_page))
            index = self._random.choice(self._by_page[page])
            text = self._made_of(index)
            if text and self._is_new(text):
                return Pair(text, frozenset([page]), index)

    def _made_of(self, index: int) -> str:
        source, passage = self._random, self._passages[index]
        kind = source.random()
        if kind < 0.2:
            parts = passage.title.split(" > ")
            words = words_of(parts[-1] if source.random() < 0.6 else passage.title)
            words = with_synonyms(without_some(words, source, 0.15), source, 0.2)
            return source.choice(THINGS).format(" ".join(words))
        if kind < 0.3 and (flags := _FLAG.findall(passage.text)):
            return source.choice(ABOUT_FLAGS).format(source.choice(flags).lower())
        if kind < 0.55:
            words = words_of(passage.text)
            length = source.randint(4, 14)
            start = source.randrange(max(1, len(words) - length))
            words = without_some(words[start : start + length], source, 0.2)
            return " ".join(with_synonyms(words, source, 0.2))
        return self._of_key_words(index)

    def _of_key_words(self, index: int) -> str:
        source, words = self._random, self._words[index]
        if not words:
            return ""
        weights = [self._rareness[word] for word in words]
        chosen = source.choices(words, weights, k=source.randint(2, 5))
        text = " ".join(with_synonyms(list(dict.fromkeys(chosen)), source, 0.25))
        return source.choice((*TASKS, *THINGS)).format(text)

    def _distinct(self, page: Sequence[int]) -> set[str]:
        return {word for index in page for word in self._words[index]}

    def _is_new(self, text: str) -> bool:
        return normal(text) not in self._unseen
