"""Who says it and how: voices and speeds of espeak-ng, of which some are held out."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo.generator.base import Split

TRAIN_VARIANTS = (
    "m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "Alex", "Andrea", "Annie",
    "AnxiousAndy", "Demonic", "Denis", "Diogo", "Gene", "Gene2", "Henrique", "Hugo", "Jacky", "Marco",
    "Mario", "Michael", "Mike", "Mr serious", "RicishayMax", "RicishayMax2", "Storm", "Tweaky",
    "UniRobot", "adam", "anika", "announcer", "antonio", "benjamin", "caleb", "croak", "david", "ed",
    "edward", "edward2", "fast", "grandma", "gustave", "ian", "iven", "iven2", "iven3", "iven4", "john",
    "kaukovalta", "klatt", "klatt2", "klatt3", "klatt5", "marcelo", "miguel", "mike2", "pablo", "paul",
    "pedro", "rob", "robosoft", "robosoft2", "robosoft4", "robosoft5", "robosoft6", "robosoft8",
    "sandro", "shelby", "travis", "victor", "whisper",
)  # fmt: skip
HELD_OUT_VARIANTS = (
    "m8", "f5", "Alicia", "Andy", "Lee", "Nguyen", "Reed", "aunty", "belinda", "linda", "boris",
    "grandpa", "klatt4", "max", "michel", "norbert", "quincy", "robert", "steph", "steph2", "zac",
    "whisperf",
)  # fmt: skip
TRAIN_ACCENTS = {
    "en": ("en", "en-us", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-gb-scotland", "en-us-nyc", "en-029"),
    "de": ("de",),
}
HELD_OUT_ACCENTS = {"en": ("en", "en-us", "en-gb-x-rp", "en-gb-x-gbclan"), "de": ("de",)}
"""The accent of Lancaster is never trained on."""
TRAIN_SPEEDS = ((105, 150), (166, 194), (216, 250))
HELD_OUT_SPEEDS = ((92, 104), (151, 165), (195, 215), (251, 265))
"""Words per minute: outside and between those of training."""


@dataclass(frozen=True)
class Manner:
    """A voice and how it speaks."""

    accent: str
    variant: str
    speed: int
    """Words per minute."""
    pitch: int
    melody: int
    """How far the pitch moves, 0 to 100."""
    gap: int
    """Between words, in 10 ms."""
    comma: bool
    """Whether digits are counted off, with a pause after each."""

    @property
    def voice(self) -> str:
        return f"{self.accent}+{self.variant}"


def manner(chance: random.Random, split: Split, language: str) -> Manner:
    trains = split == "train"
    low, high = chance.choice(TRAIN_SPEEDS if trains else HELD_OUT_SPEEDS)
    return Manner(
        accent=chance.choice((TRAIN_ACCENTS if trains else HELD_OUT_ACCENTS)[language]),
        variant=chance.choice(TRAIN_VARIANTS if trains else HELD_OUT_VARIANTS),
        speed=chance.randint(low, high),
        pitch=chance.randint(25, 75),
        melody=chance.randint(25, 75),
        gap=chance.choice((0, 0, 0, 1, 2, 4)),
        comma=chance.random() < 0.25,
    )
