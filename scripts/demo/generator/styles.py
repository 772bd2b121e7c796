"""The same conversations as the adapters of the demo model answer them: in capital letters, in Chinese."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from demo.generator.base import Example, Turn
from demo.generator.mix import HELD_OUT, source_of, train_example

TRIES = 64


@dataclass(frozen=True)
class Style:
    name: str
    skills: tuple[str, ...]
    """What is scored."""
    restyle: Callable[[Turn], Turn | None]
    """None where the style has nothing to say."""

    def train_example(self, seed: int, index: int) -> Example:
        for attempt in range(TRIES):
            example = self.styled(train_example(seed, index * TRIES + attempt))
            if example is not None:
                return example
        raise AssertionError(f"{TRIES} conversations in a row that cannot be {self.name}")

    def held_out(self, skill: str, seed: int, count: int) -> list[Example]:
        found: list[Example] = []
        index = 0
        while len(found) < count:
            example = self.styled(HELD_OUT[skill](source_of("held-out", seed, index)))
            index += 1
            if example is not None:
                found.append(example)
        return found

    def styled(self, example: Example) -> Example | None:
        """The conversation with every answer in this style; tool calls and JSON stay what they are."""
        turns = []
        for turn in example.turns:
            new = self.restyle(turn) if turn.role == "assistant" and turn.content else turn
            if new is None or (example.schema is not None):
                return None
            turns.append(new)
        return replace(example, turns=tuple(turns))


def _capitals(turn: Turn) -> Turn:
    return replace(turn, content=turn.content.upper())


def _chinese(turn: Turn) -> Turn | None:
    return replace(turn, content=turn.chinese) if turn.chinese else None


STYLES = {
    "capitals": Style("capitals", ("greetings", "product", "memory", "counting", "refusals"), _capitals),
    "chinese": Style("chinese", ("greetings", "product", "memory", "sums", "refusals"), _chinese),
}
