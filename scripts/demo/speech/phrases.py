"""What is said: rows of digits, and commands, in English and German."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from demo.generator.base import Split, is_held_out

LANGUAGES = ("en", "de")
DIGITS = {
    "en": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "de": ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
}
MOST_DIGITS = 8
SHARED_DIGITS = 1
"""Rows of so many digits are in both splits: there are only ten of them, and the voices are others."""
COMMANDS = (
    ("turn on the light", "schalte das Licht ein"),
    ("turn off the light", "schalte das Licht aus"),
    ("play the music", "spiele die Musik"),
    ("stop the music", "stoppe die Musik"),
    ("open the door", "öffne die Tür"),
    ("close the door", "schließe die Tür"),
    ("open the window", "öffne das Fenster"),
    ("close the window", "schließe das Fenster"),
    ("start the engine", "starte den Motor"),
    ("stop the engine", "stoppe den Motor"),
    ("scale up", "skaliere hoch"),
    ("scale down", "skaliere herunter"),
    ("drain the worker", "leere den Arbeiter"),
    ("start the worker", "starte den Arbeiter"),
    ("load the adapter", "lade den Adapter"),
    ("show the status", "zeige den Status"),
    ("louder please", "lauter bitte"),
    ("good morning", "guten Morgen"),
    ("thank you", "danke schön"),
    ("yes please", "ja bitte"),
)
"""Each in English and German."""


@dataclass(frozen=True)
class Phrase:
    language: str
    text: str
    english: str
    """The same in English, which is what a translation gives."""
    is_command: bool = False

    @property
    def words(self) -> list[str]:
        return self.text.split()


def row_of_digits(digits: Iterable[int], language: str) -> Phrase:
    digits = tuple(digits)

    def said(names: tuple[str, ...]) -> str:
        return " ".join(names[digit] for digit in digits)

    return Phrase(language, said(DIGITS[language]), said(DIGITS["en"]))


def command(index: int, language: str) -> Phrase:
    pair = COMMANDS[index]
    return Phrase(language, pair[LANGUAGES.index(language)], pair[0], is_command=True)


def digits(chance: random.Random, split: Split, language: str) -> Phrase:
    """A random row that belongs to the split, in whatever language it is said."""
    while True:
        row = [chance.randrange(10) for _ in range(chance.randint(1, MOST_DIGITS))]
        if len(row) <= SHARED_DIGITS or is_held_out(key(row)) == (split == "held-out"):
            return row_of_digits(row, language)


def key(row: Iterable[int]) -> str:
    return "digits " + "".join(map(str, row))


def any_phrase(chance: random.Random, split: Split, language: str, commands: float = 0.4) -> Phrase:
    if chance.random() < commands:
        return command(chance.randrange(len(COMMANDS)), language)
    return digits(chance, split, language)


def vocabulary() -> list[str]:
    """Every word that can be said, each once, in a fixed order."""
    phrases = [command(index, language) for language in LANGUAGES for index in range(len(COMMANDS))]
    names = [name for language in LANGUAGES for name in DIGITS[language]]
    return list(dict.fromkeys(names + [word for phrase in phrases for word in phrase.words]))
