"""What a conversation is, and where its random choices come from.

A source belongs to one split. Its `pick` takes words of that split only, so what the held-out set asks with
was never trained on, by construction and not by filtering.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Split = Literal["train", "held-out"]
T = TypeVar("T")

HELD_OUT_SHARE = 10
"""One of so many numbers, pairs and made-up words is held out."""


@dataclass(frozen=True)
class Call:
    """A tool called by the assistant."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    calls: tuple[Call, ...] = ()
    thought: str | None = ""
    """Of the assistant. None: the client said `enable_thinking: false` and the empty block is not learnt."""
    chinese: str | None = None
    """The same content in Chinese, for the adapter that answers so."""
    pictures: int = 0
    """So many go with it, which stand before the content or behind it."""
    pictures_last: bool = False


@dataclass(frozen=True)
class Example:
    """A conversation that ends with the assistant's turn; that turn is what a score compares with."""

    skill: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    schema: Mapping[str, Any] | None = None
    """If given, an answer is right when it fits; else when it is the same text or call."""

    @property
    def answer(self) -> Turn:
        return self.turns[-1]


@dataclass(frozen=True)
class Pool:
    """Words or wordings that mean the same kind of thing; "(one|another) way" stands for both."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        return self.train if split == "train" else self.held_out


_EITHER = re.compile(r"\(([^()]*\|[^()]*)\)")
"""Alternatives in brackets, of which one may be empty."""


def all_ways(wording: str) -> list[str]:
    """Everything that a wording with alternatives stands for."""
    found = _EITHER.search(wording)
    if found is None:
        return [wording]
    before, after = wording[: found.start()], wording[found.end() :]
    return [way for one in found[1].split("|") for way in all_ways(before + one + after)]


def is_held_out(key: str) -> bool:
    """For what is too numerous to list: pairs of numbers, made-up words."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


@dataclass
class Source:
    """Random choices of one conversation."""

    split: Split
    random: random.Random = field(default_factory=random.Random)

    def pick(self, pool: Pool) -> str:
        wording = self.random.choice(pool.of(self.split))
        return _EITHER.sub(lambda found: self.random.choice(found[1].split("|")), wording)

    def one_of(self, choices: Sequence[T]) -> T:
        """A choice that both splits share."""
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def owns(self, key: str) -> bool:
        return is_held_out(key) == (self.split == "held-out")


def user(content: str) -> Turn:
    return Turn("user", content)


def reply(content: str, thought: str | None = "", *, chinese: str | None = None) -> Turn:
    return Turn("assistant", content, thought=thought, chinese=chinese)


def calling(*calls: Call) -> Turn:
    return Turn("assistant", calls=calls)
