"""Which skills a data set has, and how much of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from demo.generator import (
    counting,
    greetings,
    json_objects,
    memory,
    product,
    refusals,
    sums,
    tool_calls,
)
from demo.generator.base import Example, Source, Split, Turn

WEIGHTS: dict[Callable[[Source], Example], int] = {
    sums.make: 24,
    tool_calls.make: 26,
    product.make: 24,
    json_objects.make: 10,
    counting.make: 9,
    memory.make: 7,
    greetings.make: 4,
    refusals.make: 3,
    memory.long_talk: 1,
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are demo-chat.",
    "You are a friendly assistant. Answer briefly.",
    "Be brief and polite.",
)
_SKILLS, _SHARES = tuple(WEIGHTS), tuple(WEIGHTS.values())


def train_example(seed: int, index: int) -> Example:
    """The same for a seed and an index, whoever makes it and in whatever order."""
    source = source_of("train", seed, index)
    make = source.random.choices(_SKILLS, _SHARES)[0]
    example = make(source)
    if source.chance(0.15):
        prompt = Turn("system", source.one_of(SYSTEM_PROMPTS))
        example = replace(example, turns=(prompt, *example.turns))
    return example


HELD_OUT: dict[str, Callable[[Source], Example]] = {
    "sums": sums.make,
    "tools": tool_calls.call,
    "product": product.make,
    "memory": memory.make,
    "json": json_objects.make,
    "tool results": tool_calls.result,
    "counting": counting.make,
    "greetings": greetings.make,
    "refusals": refusals.make,
}


def held_out(skill: str, seed: int, count: int) -> Iterator[Example]:
    for index in range(count):
        yield HELD_OUT[skill](source_of("held-out", seed, index))


def source_of(split: Split, seed: int, index: int) -> Source:
    return Source(split, random.Random(f"{split} {seed} {index}"))
