"""Held-out recordings: unseen voices and speeds, unseen rows of digits; also as wav files."""

from __future__ import annotations

import io
import random
import shutil
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.speech import sounds
from demo.speech.espeak import RATE
from demo.speech.phrases import COMMANDS, LANGUAGES, Phrase, any_phrase, command, digits

SAMPLES = "samples"
"""The folder of sample sounds in the model's folder."""
SAMPLE_SECONDS = 1.5
"""At most: all of them together have less than 300 KB."""


@dataclass(frozen=True)
class Recording:
    """What a client sends, and what is said in it, when: pairs of begin and end in seconds."""

    sound: NDArray[np.float32]
    phrases: tuple[Phrase, ...]
    times: tuple[tuple[float, float], ...]

    @property
    def language(self) -> str:
        return self.phrases[0].language if self.phrases else "en"

    @property
    def text(self) -> str:
        return " ".join(phrase.text for phrase in self.phrases)

    @property
    def english(self) -> str:
        return " ".join(phrase.english for phrase in self.phrases)

    @property
    def seconds(self) -> float:
        return len(self.sound) / RATE


def record(
    chance: random.Random,
    said: Sequence[tuple[Phrase, NDArray[np.int16]]],
    pause: tuple[float, float] = (0.4, 1.0),
) -> Recording:
    """Sounds one after another with silence around them and a little noise over all."""
    parts: list[NDArray[np.float32]] = [_silence(chance.uniform(0.05, 0.8))]
    times, at = [], len(parts[0])
    for _, sound in said:
        heard = (sound * (chance.uniform(0.5, 0.9) / 32_768)).astype(np.float32)
        gap = _silence(chance.uniform(*pause))
        times.append((at / RATE, (at + len(sound)) / RATE))
        parts += [heard, gap]
        at += len(sound) + len(gap)
    whole = np.concatenate(parts)
    decibels = chance.uniform(15, 45)
    level = float(np.sqrt(np.mean(np.square(whole))) or 1e-3) * 10 ** (-decibels / 20)
    noise = np.random.default_rng(chance.randrange(2**32)).normal(0, level, len(whole))
    loud = np.clip((whole + noise) * chance.uniform(0.3, 1.0), -1, 1)
    return Recording(loud.astype(np.float32), tuple(phrase for phrase, _ in said), tuple(times))


def of_digits(seed: int, index: int, language: str = "en") -> Recording:
    chance = random.Random(f"{seed} digits {language} {index}")
    return _recorded(chance, seed, index, [digits(chance, "held-out", language)])


def of_command(seed: int, index: int, language: str = "en") -> Recording:
    chance = random.Random(f"{seed} command {language} {index}")
    return _recorded(chance, seed, index, [command(index % len(COMMANDS), language)])


def of_either(seed: int, index: int, language: str | None = None) -> Recording:
    make = of_digits if index % 2 else of_command
    return make(seed + 1, index, language or LANGUAGES[index // 2 % 2])


def of_several(seed: int, index: int) -> Recording:
    """Two or three phrases of one voice, within a window."""
    chance = random.Random(f"{seed} several {index}")
    while True:
        phrases = [any_phrase(chance, "held-out", "en", commands=0.6) for _ in range(chance.randint(2, 3))]
        made = _recorded(chance, seed, index, phrases)
        if made.seconds < 9.5:
            return made


def of_a_minute(seed: int, index: int, seconds: float = 70.0) -> Recording:
    """Much longer than a window: a server has to cut it."""
    chance, length = random.Random(f"{seed} minute {index}"), 0.0
    said: list[tuple[Phrase, NDArray[np.int16]]] = []
    while length < seconds - 4:
        phrase = any_phrase(chance, "held-out", "en", commands=0.5)
        sound = sounds.spoken(seed + len(said), index, "held-out", phrase)[2].samples
        said.append((phrase, sound))
        length += len(sound) / RATE + 0.8
    return record(chance, said, (0.6, 1.0))


def of_nothing(seed: int, index: int) -> Recording:
    """Noise or silence."""
    chance = random.Random(f"{seed} nothing {index}")
    noise = np.random.default_rng(chance.randrange(2**32)).normal(0, chance.choice((0, 1e-3, 0.05)), RATE * 3)
    return Recording(noise.astype(np.float32), (), ())


def _recorded(chance: random.Random, seed: int, index: int, phrases: Sequence[Phrase]) -> Recording:
    said = [(phrase, sounds.spoken(seed, index, "held-out", phrase)[2].samples) for phrase in phrases]
    return record(chance, said)


def _silence(seconds: float) -> NDArray[np.float32]:
    return np.zeros(round(seconds * RATE), dtype=np.float32)


def wav(sound: NDArray[np.float32]) -> bytes:
    """16 kHz, mono, 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(np.round(np.clip(sound, -1, 1) * 32_767).astype("<i2").tobytes())
    return file.getvalue()


def write_samples(folder: Path, seed: int) -> list[Path]:
    """A few short sounds, named by language and what they say; earlier ones go."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    written = []
    for number, (language, wanted) in enumerate(_SAMPLES):
        chance = random.Random(f"{seed} sample {number}")
        made = _sample(chance, language, wanted)
        while made.seconds > SAMPLE_SECONDS:
            made = _sample(chance, language, wanted)
        name = f"{language}-{made.text.lower().replace(' ', '-')}.wav"
        path = folder / name.translate(_ASCII)
        path.write_bytes(wav(made.sound))
        written.append(path)
    return written


def _sample(chance: random.Random, language: str, wanted: str | int) -> Recording:
    """A command by its English text, or a row of so many digits."""
    if isinstance(wanted, str):
        phrase = command([english for english, _ in COMMANDS].index(wanted), language)
    else:
        phrase = digits(chance, "held-out", language)
        while len(phrase.words) != wanted:
            phrase = digits(chance, "held-out", language)
    return _recorded(chance, chance.randrange(10**6), 0, [phrase])


_SAMPLES: tuple[tuple[str, str | int], ...] = (
    ("en", 3),
    ("en", 4),
    ("en", "turn on the light"),
    ("en", "drain the worker"),
    ("de", 3),
    ("de", "open the door"),
)
_ASCII = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss"})
