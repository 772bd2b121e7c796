"""Defines what is sent to an engine: requests in phases, the same for an engine with and without tiers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST_TOKEN, LAST_TOKEN = 10, 900


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request; what is not given is vLLM's default."""

    name: str
    prompt: Sequence[int]
    max_tokens: int = 8
    salt: str | None = None
    adapter: str | None = None
    image: int | None = None
    """The seed of an image that stands before the prompt."""
    sound: int | None = None
    """The seed of the sound that an encoder hears."""
    embeds: int | None = None
    """The seed of embeddings that stand in place of the prompt's tokens."""
    n: int = 1
    regex: str | None = None
    prompt_logprobs: bool = False
    rank: int | None = None
    """The data-parallel rank that gets it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some requests, one after the other or all at once."""

    name: str
    asks: Sequence[Ask]
    together: bool = False
    aborts: dict[str, int] = field(default_factory=dict)
    """Requests that are aborted, and after how many steps; their answers are not compared."""
    loads: bool | None = None
    """Whether tokens must come from a tier; False if none may, None if both is right."""
    before: str | None = None
    """An operation before it, by name: `sleep-1`, `sleep-2`, `clear`, `other-weights`."""


Plan = Callable[[int], list[Phase]]
"""Makes the phases from the size of a block, in tokens."""


def tokens(seed: int, count: int) -> list[int]:
    """Returns random tokens, always the same for a seed."""
    chance = random.Random(seed * 7919)
    return [chance.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def lengths(block: int) -> list[int]:
    """Returns lengths of prompts that end within, at, before and behind the end of a block."""
    return [
        9 * block + block // 2,
        6 * block,
        4 * block + 1,
        7 * block - 1,
        12 * block + 3,
        block // 2,
        8 * block,
    ]


def everyday(block: int, **more: Any) -> list[Phase]:
    """Prompts alone, again, continued, branching, in a crowd that is preempted, and aborted."""
    prompts = [tokens(number, length) for number, length in enumerate(lengths(block))]
    alone = [Ask(name=f"p{number}", prompt=prompt, **more) for number, prompt in enumerate(prompts)]
    turns = [
        Ask(name=f"t{number}", prompt=[*prompt, *tokens(100 + number, 2 * block + 5)], **more)
        for number, prompt in enumerate(prompts)
    ]
    branches = [
        Ask(name=f"b{number}", prompt=[*prompt[: len(prompt) // 2], *tokens(200 + number, block)], **more)
        for number, prompt in enumerate(prompts)
    ]
    crowd = [
        Ask(name=f"c{number}", prompt=ask.prompt, **{**more, "max_tokens": block + block // 2})
        for number, ask in enumerate([*alone, *branches, *alone[:3]])
    ]
    ended = {ask.name: 1 + number % 5 for number, ask in enumerate(crowd) if number % 3 == 1}
    return [
        Phase(name="cold", asks=alone, loads=False),
        Phase(name="again", asks=alone, loads=True),
        Phase(name="continued", asks=turns, loads=True),
        Phase(name="branching", asks=branches, loads=True),
        Phase(name="crowd", asks=crowd, together=True, loads=True),
        Phase(name="aborted", asks=crowd, together=True, aborts=ended, loads=True),
        Phase(name="after all", asks=alone[::-1], loads=True),
    ]


def sparse(block: int, **more: Any) -> list[Phase]:
    """The same for models with states, of which vLLM keeps some: a branch may find none."""
    return [
        dataclasses.replace(phase, loads=None) if phase.name == "branching" else phase
        for phase in everyday(block, **more)
    ]


def short(block: int, **more: Any) -> list[Phase]:
    """The first two phases and the crowd, with fewer prompts."""
    phases = {phase.name: phase for phase in everyday(block, **more)}
    return [phases["cold"], phases["again"], phases["crowd"]]


def brief(block: int, **more: Any) -> list[Phase]:
    """The same with the shorter half of the prompts, for what a CPU computes slowly."""
    return [
        dataclasses.replace(
            phase,
            asks=[
                dataclasses.replace(ask, max_tokens=3) for ask in phase.asks if len(ask.prompt) < 7 * block
            ],
        )
        for phase in short(block, **more)
    ]


def quick(block: int, **more: Any) -> list[Phase]:
    """A few seconds' worth."""
    sizes = (6 * block, 4 * block + 1, 5 * block - 1, 3 * block + 7)
    alone = [
        Ask(name=f"p{at}", prompt=tokens(at, size), max_tokens=4, **more) for at, size in enumerate(sizes)
    ]
    crowd = [
        Ask(name=f"c{at}", prompt=[*ask.prompt, *tokens(9 - at, at)], max_tokens=block // 4, **more)
        for at, ask in enumerate([*alone, *alone[:2]])
    ]
    return [
        Phase(name="cold", asks=alone, loads=False),
        Phase(name="again", asks=alone, loads=True),
        Phase(name="crowd", asks=crowd, together=True, aborts={"c1": 2}, loads=True),
        Phase(name="after all", asks=alone, loads=True),
    ]


def in_other_orders(phases: Sequence[Phase], orders: int) -> list[Phase]:
    """Adds each crowd again, in other orders: an engine then computes other requests together."""
    found = list(phases)
    crowds = [phase for phase in phases if phase.together and not phase.aborts]
    for number in range(1, orders + 1):
        for crowd in crowds:
            asks = random.Random(number).sample(list(crowd.asks), len(crowd.asks))
            name = f"{crowd.name}, order {number}"
            found.append(dataclasses.replace(crowd, name=name, asks=asks, before=None))
    return found
