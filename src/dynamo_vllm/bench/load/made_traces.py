"""Makes traces for routing benchmarks: kinds of traffic that a recorded trace may not have.

Each is the same in every run. The times suit two workers of the runtime's simulator; `--rate-scale` changes
them.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from dynamo_vllm.bench.load.trace import BLOCK, Line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

REQUESTS = 600


def tenants() -> Iterator[Line]:
    """Two dozen system prompts, a few of which most requests have, each with a question of its own."""
    source = _Source("tenants")
    prefixes = [source.blocks(3, 16) for _ in range(24)]
    weights = [1 / rank for rank in range(1, len(prefixes) + 1)]
    for at in source.times(per_second=12):
        [prefix] = source.random.choices(prefixes, weights)
        yield source.line(at, [*prefix, *source.blocks(1, 2)], (20, 300))


def agents() -> Iterator[Line]:
    """Conversations of 4 to 16 steps, each with all that was said before."""
    source = _Source("agents")
    prompts = [source.blocks(8, 8) for _ in range(4)]
    for at in source.times(per_second=1, count=REQUESTS // 10):
        said, now = list(source.random.choice(prompts)), at
        for _ in range(source.random.randint(4, 16)):
            said += source.blocks(1, 5)
            line = source.line(now, said, (30, 400))
            yield line
            now += line.output_length * 0.02 + source.random.uniform(0.5, 6)


def alone() -> Iterator[Line]:
    """Prompts that have nothing in common."""
    source = _Source("alone")
    for at in source.times(per_second=10):
        count = min(32, max(1, round(source.random.lognormvariate(1.5, 1))))
        yield source.line(at, source.blocks(count, count), (20, 400))


def bursts() -> Iterator[Line]:
    """A new document now and then, and a few dozen questions about it within seconds."""
    source = _Source("bursts")
    for at in source.times(per_second=0.8, count=REQUESTS // 25):
        document = source.blocks(5, 25)
        for _ in range(source.random.randint(10, 40)):
            yield source.line(
                at + source.random.uniform(0, 1.5), [*document, *source.blocks(1, 1)], (20, 200)
            )


def shared() -> Iterator[Line]:
    """One prompt that begins every request, and long answers."""
    source = _Source("shared")
    prefix = source.blocks(8, 8)
    for at in source.times(per_second=8):
        yield source.line(at, [*prefix, *source.blocks(1, 2)], (300, 1200))


class _Source:
    """Draws times and blocks."""

    def __init__(self, name: str) -> None:
        self.random = random.Random(name)
        self._ids = itertools.count()

    def blocks(self, least: int, most: int) -> list[int]:
        """New text: blocks that no other request has."""
        return list(itertools.islice(self._ids, self.random.randint(least, most)))

    def times(self, per_second: float, count: int = REQUESTS) -> Iterator[float]:
        """Seconds at which requests come at random."""
        at = 0.0
        for _ in range(count):
            at += self.random.expovariate(per_second)
            yield at

    def line(self, at: float, blocks: list[int], answer: tuple[int, int]) -> Line:
        tokens = len(blocks) * BLOCK - self.random.randrange(BLOCK // 2)
        return Line(at * 1000, tokens, self.random.randint(*answer), list(blocks))


MADE: Mapping[str, Callable[[], Iterator[Line]]] = {
    trace.__name__: trace for trace in (tenants, agents, alone, bursts, shared)
}
