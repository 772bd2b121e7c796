"""Windows to learn from: which sounds lie where in ten seconds, and what the decoder is to say of them.

No torch here: many processes make them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.corpus import in_processes
from demo.speech import tokens
from demo.speech.espeak import RATE
from demo.speech.phrases import LANGUAGES, Phrase, vocabulary

CHUNK = 5000
SLOTS = 6
"""Sounds in a window at most."""
SAMPLES = tokens.WINDOW * RATE
POSITIONS = 128
"""Of the decoder: what was said before, the prompt and the answer."""
UNKNOWN = 255
"""A frame of which it is not known what word it is part of."""
HOW_MANY = (0.04, 0.42, 0.21, 0.14, 0.10, 0.06, 0.03)
"""Shares of windows with no sound, one, two and so on."""
SMALLEST_GAP = 0.25
"""Seconds between two sounds: a shorter pause does not part segments."""
WITH_TIMES = 0.4
FROM_ZERO = 0.7
"""Of these: the first segment begins at 0, as vLLM makes it, and not where the sound begins."""
TRANSLATED = {"en": 0.1, "de": 0.35}
WITH_PREVIOUS = 0.06
IGNORED = -100


@dataclass(frozen=True)
class Placed:
    """A sound in a window; times in samples."""

    sound: int
    at: int
    length: int


@dataclass(frozen=True)
class Windows:
    """One row per window."""

    sounds: NDArray[np.int32]
    """Which, by slot; -1 for none."""
    places: NDArray[np.int32]
    """Where they begin, in samples."""
    ends: NDArray[np.int32]
    """Where the recording ends; behind it the window is padded with zeros."""
    ids: NDArray[np.int16]
    """What the decoder reads."""
    learnt: NDArray[np.int16]
    """What it is to say next, or IGNORED."""
    frames: NDArray[np.uint8]
    """What word is said in each frame of the encoder, by number from 1; 0 for none."""

    def __len__(self) -> int:
        return len(self.ends)


def build(
    tokenizer: Tokenizer,
    lengths: NDArray[np.int64],
    words: Sequence[tuple[int, ...]],
    phrases: Sequence[Phrase],
    seed: int,
    count: int,
    processes: int = 0,
) -> Windows:
    """So many windows of a seed, of sounds with these lengths, begins of words and meanings."""
    tasks = [(seed, first, min(CHUNK, count - first)) for first in range(0, count, CHUNK)]
    arguments = (tokenizer.to_str(), lengths, tuple(words), tuple(phrases))
    parts = in_processes(_chunk, tasks, _prepare, arguments, processes)
    return Windows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def place(
    chance: random.Random, lengths: Sequence[int], choose: Callable[[], int]
) -> tuple[list[Placed], int]:
    """Sounds one after another with pauses, as many as were drawn or fit, and the end of the recording."""
    wanted = chance.choices(range(SLOTS + 1), HOW_MANY)[0]
    at = round(chance.choice((0.0, 0.1, 0.5, 1.0, 2.0)) * chance.random() * RATE)
    placed: list[Placed] = []
    spoken_until = 0
    for _ in range(wanted):
        sound = choose()
        length = int(lengths[sound])
        if at + length > SAMPLES:
            break
        placed.append(Placed(sound, at, length))
        spoken_until = at + length
        at = spoken_until + round((SMALLEST_GAP + chance.choice((0.1, 0.5, 1.5)) * chance.random()) * RATE)
    if not placed:
        spoken_until = round(chance.random() * SAMPLES)
    if chance.random() < 0.2:
        return placed, SAMPLES
    return placed, min(SAMPLES, spoken_until + round(chance.choice((0.0, 0.3, 1.5)) * chance.random() * RATE))


class Writer:
    """Writes what the decoder reads and says."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._numbers = {word: number for number, word in enumerate(vocabulary(), start=1)}
        self._end, self._start = self.control(tokens.END), self.control(tokens.START)
        self._zero = self.control(tokens.time(0))
        self._cache: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._tokenizer.encode(text).ids
        return self._cache[text]

    def control(self, token: str) -> int:
        return tokens.number(self._tokenizer, token)

    def time(self, sample: int) -> int:
        return self._zero + min(tokens.LAST, round(sample * tokens.TICKS / RATE))

    def frames(
        self, placed: Sequence[Placed], begins: Sequence[tuple[int, ...]], phrases: Sequence[Phrase]
    ) -> NDArray[np.uint8]:
        """A word goes on until the next one begins."""
        found = np.zeros(tokens.LAST, dtype=np.uint8)
        for one, words, phrase in zip(placed, begins, phrases, strict=True):
            found[_frame(one.at) : _frame(one.at + one.length)] = UNKNOWN
            ends = (*words[1:], one.length)
            for word, begin, end in zip(phrase.words if words else (), words, ends, strict=False):
                found[_frame(one.at + begin) : _frame(one.at + end)] = self._numbers[word]
        return found

    def answer(
        self, placed: Sequence[Placed], phrases: Sequence[Phrase], translates: bool, times: bool, zero: bool
    ) -> list[int]:
        """Texts one after another, each between its timestamps if there are any, and the end."""
        said: list[int] = [self._zero] if times and not placed else []
        for index, (one, phrase) in enumerate(zip(placed, phrases, strict=True)):
            begin = 0 if zero and not index else one.at
            text = self.text(f" {phrase.english if translates else phrase.text}")
            said += [self.time(begin), *text, self.time(one.at + one.length)] if times else text
        return [*said, self._end]

    def previous(self, chance: random.Random, phrase: Phrase) -> list[int]:
        """Text that a client gives as context, which changes nothing. vLLM writes `<|prev|>`, no token."""
        if chance.random() < 0.5:
            return [self.control(tokens.PREVIOUS), *self.text(f" {phrase.text}")]
        noise = [chance.randrange(256) for _ in range(chance.randint(1, 24))]
        return [*self.text("<|prev|>"), *(noise if chance.random() < 0.5 else self.text(phrase.text))]

    def row(
        self, chance: random.Random, placed: Sequence[Placed], phrases: Sequence[Phrase], code: str
    ) -> tuple[list[int], list[int]]:
        """What is read and, shifted by one, what is learnt: the language, the answer, not the prompt."""
        times, zero = chance.random() < WITH_TIMES, chance.random() < FROM_ZERO
        translates = chance.random() < TRANSLATED[code]
        before: list[int] = []
        if phrases and chance.random() < WITH_PREVIOUS:
            before = self.previous(chance, phrases[-1])
        task = self.control(tokens.TRANSLATE if translates else tokens.TRANSCRIBE)
        prompt = [*before, self._start, self.control(tokens.language(code)), task]
        answer = self.answer(placed, phrases, translates, times, zero)
        if not times:
            prompt.append(self.control(tokens.NO_TIMES))
        elif zero and placed:
            prompt.append(answer.pop(0))
        elif not placed:
            prompt.append(self._zero)
        ids = [*prompt, *answer]
        learnt = [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]
        if placed:
            learnt[len(before)] = prompt[len(before) + 1]  # the language
        return ids, learnt


_worker: dict[str, Any] = {}


def _frame(sample: int) -> int:
    return round(sample * tokens.TICKS / RATE)


def _prepare(
    tokenizer: str,
    lengths: NDArray[np.int64],
    words: tuple[tuple[int, ...], ...],
    phrases: tuple[Phrase, ...],
) -> None:
    _worker["writer"] = Writer(Tokenizer.from_str(tokenizer))
    _worker["lengths"], _worker["words"], _worker["phrases"] = lengths.tolist(), words, phrases
    _worker["by language"] = {
        code: [index for index, phrase in enumerate(phrases) if phrase.language == code] for code in LANGUAGES
    }


def _chunk(task: tuple[int, int, int]) -> tuple[NDArray[Any], ...]:
    seed, first, count = task
    writer, lengths, phrases = _worker["writer"], _worker["lengths"], _worker["phrases"]
    sounds = np.full((count, SLOTS), -1, np.int32)
    places = np.zeros((count, SLOTS), np.int32)
    ends = np.zeros(count, np.int32)
    ids = np.full((count, POSITIONS), writer.control(tokens.END), np.int16)
    learnt = np.full((count, POSITIONS), IGNORED, np.int16)
    frames = np.zeros((count, tokens.LAST), np.uint8)
    for row in range(count):
        chance = random.Random(f"{seed} window {first + row}")
        code = "en" if chance.random() < 0.6 else "de"
        candidates = _worker["by language"][code]
        placed, ends[row] = place(chance, lengths, partial(chance.choice, candidates))
        said = [phrases[one.sound] for one in placed]
        read, says = writer.row(chance, placed, said, code)
        sounds[row, : len(placed)] = [one.sound for one in placed]
        places[row, : len(placed)] = [one.at for one in placed]
        ids[row, : len(read)], learnt[row, : len(says)] = read, says
        frames[row] = writer.frames(placed, [_worker["words"][one.sound] for one in placed], said)
    return sounds, places, ends, ids, learnt, frames
