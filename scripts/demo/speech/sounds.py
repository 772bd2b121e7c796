"""Spoken phrases in flat arrays, made by all cores; no torch here, each process starts with this module."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from demo.corpus import in_processes
from demo.generator.base import Split
from demo.speech import espeak
from demo.speech.espeak import RATE, Spoken
from demo.speech.phrases import LANGUAGES, Phrase, any_phrase
from demo.speech.voices import Manner, manner

CHUNK = 500
LONGEST = 8 * RATE
"""Samples; a slower row of digits would not fit into a window."""


@dataclass(frozen=True)
class Sounds:
    samples: NDArray[np.int16]
    starts: NDArray[np.int64]
    """Where each begins, and the end of the last."""
    words: tuple[tuple[int, ...], ...]
    """Where the words of each begin, in samples; empty where that is not known."""
    phrases: tuple[Phrase, ...]
    manners: tuple[Manner, ...]

    def __len__(self) -> int:
        return len(self.phrases)

    def of(self, index: int) -> NDArray[np.int16]:
        return self.samples[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)


def build(seed: int, count: int, split: Split = "train", processes: int = 0) -> Sounds:
    """So many phrases of a seed; the same ones whatever the number of processes."""
    tasks = [(seed, first, min(CHUNK, count - first), split) for first in range(0, count, CHUNK)]
    parts = in_processes(_chunk, tasks, _prepare, (), processes)
    said = [one for part in parts for one in part]
    lengths = [len(sound.samples) for _, _, sound in said]
    return Sounds(
        np.concatenate([sound.samples for _, _, sound in said]),
        np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        tuple(sound.words for _, _, sound in said),
        tuple(phrase for phrase, _, _ in said),
        tuple(how for _, how, _ in said),
    )


def spoken(
    seed: int, index: int, split: Split, phrase: Phrase | None = None
) -> tuple[Phrase, Manner, Spoken]:
    """A phrase, drawn unless given; drawn again where it would take too long."""
    chance = random.Random(f"{seed} {split} {index}")
    while True:
        language = LANGUAGES[0] if chance.random() < 0.6 else LANGUAGES[1]
        drawn = phrase or any_phrase(chance, split, language)
        how = manner(chance, split, drawn.language)
        sound = espeak.say(drawn, how)
        if len(sound.samples) <= LONGEST:
            return drawn, how, sound


def _prepare() -> None:
    """Nothing: the library is loaded with the first phrase."""


def _chunk(task: tuple[int, int, int, Split]) -> list[tuple[Phrase, Manner, Spoken]]:
    seed, first, count, split = task
    return [spoken(seed, index, split) for index in range(first, first + count)]
