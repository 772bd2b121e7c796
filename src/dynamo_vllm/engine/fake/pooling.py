"""Pools without a model: the vector of a prompt follows from its tokens."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

from dynamo_vllm.job import Output, PooledPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dynamo_vllm.job import PoolingSpec, TextOptions


class FakeVector:
    """Numbers in a row, in the form of numpy's arrays."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = array("f", numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._numbers),)

    def tolist(self) -> list[Any]:
        return self._numbers.tolist()

    def tobytes(self) -> bytes:
        return self._numbers.tobytes()


class FakePrompts:
    """Makes one token of each character, and puts a token between the texts of a pair."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    async def of_texts(self, texts: Sequence[str], options: TextOptions) -> list[PooledPrompt]:
        return self.of_ids([self._ids(text) for text in texts], options)

    def of_ids(self, prompts: Sequence[Sequence[int]], options: TextOptions) -> list[PooledPrompt]:
        keep = options.keep if options.keep is not None and options.keep > 0 else None
        return [PooledPrompt(prompt[:keep]) for prompt in prompts]

    async def of_pairs(self, pairs: Sequence[tuple[str, str]], options: TextOptions) -> list[PooledPrompt]:
        made = []
        for first, second in pairs:
            before = [*self._ids(first), 2]
            made.append(PooledPrompt([*before, *self._ids(second)], len(before)))
        return made

    async def of_chat(self, messages: Sequence[Mapping[str, Any]], options: TextOptions) -> PooledPrompt:
        return PooledPrompt(self._ids("".join(str(message.get("content")) for message in messages)))

    def _ids(self, text: str) -> list[int]:
        return [ord(char) % self._vocab_size for char in text]


def outputs(spec: PoolingSpec, dimensions: int) -> Iterator[Output]:
    """Yields what a model would give, in pieces as the job asks for."""
    size = spec.dimensions or dimensions
    vectors = [_vector(prompt, size) for prompt in spec.prompts]
    if spec.pairs:
        vectors = [[_cosine(vectors[one], vectors[other])] for one, other in spec.pairs]
    step = max(1, spec.values_per_output // size) if spec.values_per_output else len(vectors)
    for first in range(0, len(vectors), step):
        is_last = first + step >= len(vectors)
        yield Output(
            [],
            index=first,
            finish="stop" if is_last else None,
            finished=is_last,
            cached_tokens=0 if is_last else None,
            pooled=[FakeVector(vector) for vector in vectors[first : first + step]],
        )


def _vector(prompt: PooledPrompt, size: int) -> list[float]:
    """Counts tokens by their number, weighted by whether they occur in the first text too; length one."""
    at = prompt.second_at
    if at is not None:
        first = set(prompt.tokens[:at])
        second = prompt.tokens[at:]
        return [sum(token in first for token in second) / max(1, len(second))] * size
    counts = [0.0] * size
    for token in prompt.tokens:
        counts[token % size] += 1.0
    length = math.hypot(*counts) or 1.0
    return [count / length for count in counts]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
