"""The same conversations as the adapters of the demo model answer them: in capital letters, in Chinese."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from demo.generator.base import Example, Turn
from demo.generator.mix import HELD_OUT, source_of, train_example
from demo.generator.words import is_chinese

TRIES = 64


@dataclass(frozen=True)
class Style:
    name: str
    skills: tuple[str, ...]
    """What is scored."""
    restyle: Callable[[Turn], Turn | None]
    """None where the style has nothing to say."""
    is_in: Callable[[str], bool]
    """Whether an answer is in this style, right or not."""

    def train_example(self, seed: int, index: int) -> Example:
        for attempt in range(TRIES):
            example = self.styled(train_example(seed, index * TRIES + attempt))
            if example is not None:
                return example
        raise AssertionError(f"{TRIES} conversations in a row that cannot be {self.name}")

    def held_out(self, skill: str, seed: int, count: int) -> list[Example]:
        """Those whose answer the style changes: others, such as digits, could not show it."""
        found: list[Example] = []
        index = 0
        while len(found) < count:
            plain = HELD_OUT[skill](source_of("held-out", seed, index))
            example = self.styled(plain)
            index += 1
            if example is not None and example.answer != plain.answer:
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


def _is_in_capitals(text: str) -> bool:
    return text == text.upper() != ""


def _is_in_chinese(text: str) -> bool:
    """A name alone, such as that of a licence, shows it by its full stop."""
    return is_chinese(text) or text.endswith("。")


STYLES = {
    "capitals": Style(
        "capitals", ("greetings", "product", "memory", "counting", "refusals"), _capitals, _is_in_capitals
    ),
    "chinese": Style(
        "chinese", ("greetings", "product", "memory", "sums", "refusals"), _chinese, _is_in_chinese
    ),
}
