"""Makes the requests of single cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tiers_proof.requests import Ask, Phase, everyday, lengths, quick, short, tokens


def repetitive(block: int) -> list[Phase]:
    """Prompts that repeat themselves, so that some drafts are right."""
    asks = [
        Ask(name=f"p{number}", prompt=(tokens(number, 40) * 12)[:length], max_tokens=block)
        for number, length in enumerate(lengths(block))
    ]
    return [
        Phase(name="cold", asks=asks, loads=False),
        Phase(name="again", asks=asks, loads=True),
        Phase(name="crowd", asks=asks, together=True, loads=True),
        Phase(name="after all", asks=asks, loads=True),
    ]


def without_cache(block: int) -> list[Phase]:
    return [phase for phase in everyday(block) if phase.name != "aborted"]


def prompt_logprobs(block: int) -> list[Phase]:
    """vLLM computes the whole prompt for them, so nothing may be loaded."""
    asked = [Ask(name=ask.name, prompt=ask.prompt, prompt_logprobs=True) for ask in everyday(block)[0].asks]
    return [*short(block)[:2], Phase(name="asked", asks=asked, loads=False), *short(block)[1:2]]


def salts(block: int) -> list[Phase]:
    """A prompt is found only with its own salt."""
    return _kinds(
        {
            name: [
                Ask(name=f"{name}{number}", prompt=tokens(number, 6 * block + 3), salt=salt)
                for number in range(3)
            ]
            for name, salt in (("none", None), ("one", "one"), ("other", "other"))
        }
    )


def adapters(block: int) -> list[Phase]:
    """A prompt is found only with its own adapter.

    The model itself is not in the crowd: there vLLM 0.32 mixes it up with adapters on CPU, without tiers too.
    """
    return _kinds(
        {
            name: [
                Ask(name=f"{name}{number}", prompt=tokens(number, 6 * block + 3), adapter=adapter)
                for number in range(3)
            ]
            for name, adapter in (("model", None), ("a", "a"), ("b", "b"))
        },
        alone=("model",),
    )


def _kinds(asks: Mapping[str, Sequence[Ask]], alone: Sequence[str] = ()) -> list[Phase]:
    crowd = [ask for name, found in asks.items() if name not in alone for ask in found]
    return [
        *(Phase(name=f"cold, {name}", asks=found, loads=False) for name, found in asks.items()),
        *(Phase(name=f"again, {name}", asks=found, loads=True) for name, found in asks.items()),
        Phase(name="crowd", asks=crowd, together=True, loads=True),
    ]


def images(block: int) -> list[Phase]:
    asks = [
        Ask(name=f"{number}-{seed}", prompt=tokens(number, 5 * block + 3), image=seed)
        for number in range(4)
        for seed in (1, 2)
    ]
    return [
        Phase(name="cold", asks=asks[0::2], loads=False),
        Phase(name="cold, other images", asks=asks[1::2], loads=False),
        Phase(name="again", asks=asks[0::2], loads=True),
        Phase(name="again, other images", asks=asks[1::2], loads=True),
        Phase(name="crowd", asks=asks, together=True, loads=True),
    ]


def embeds(block: int) -> list[Phase]:
    sizes = lengths(block)[:4]
    asks = [Ask(name=f"e{seed}", prompt=[0] * size, embeds=seed) for seed, size in enumerate(sizes)]
    others = [Ask(name=f"o{seed}", prompt=[0] * size, embeds=50 + seed) for seed, size in enumerate(sizes)]
    return [
        Phase(name="cold", asks=asks, loads=False),
        Phase(name="cold, others", asks=others, loads=False),
        Phase(name="again", asks=asks, loads=True),
        Phase(name="again, others", asks=others, loads=True),
    ]


def speech(_block: int) -> list[Phase]:
    """The decoder's prompt has whole blocks, and what it says depends on the sound alone."""
    prompt = tokens(1, 48)
    asks = [Ask(name=f"s{seed}", prompt=prompt, sound=seed, max_tokens=8) for seed in range(4)]
    filler = [
        Ask(name=f"f{number}", prompt=tokens(10 + number, 48), sound=9, max_tokens=2) for number in range(12)
    ]
    return [
        Phase(name="cold", asks=asks, loads=False),
        Phase(name="others", asks=filler),
        Phase(name="again", asks=asks),
    ]


def first_life(block: int) -> list[Phase]:
    return everyday(block)[:1]


def second_life(block: int) -> list[Phase]:
    """What the first life left on disk is found."""
    return [phase for phase in everyday(block) if phase.name in ("again", "branching", "crowd")]


def other_life(block: int) -> list[Phase]:
    """Nothing of the first life may be found."""
    return everyday(block)[:2]


def first_adapter_life(block: int) -> list[Phase]:
    return [Phase(name="cold", asks=_of_adapter(block), loads=False)]


def second_adapter_life(block: int) -> list[Phase]:
    asks = _of_adapter(block)
    return [Phase(name="other content", asks=asks, loads=False), Phase(name="again", asks=asks, loads=True)]


def after(operation: str, block: int, *, loads: bool = False) -> list[Phase]:
    """After an operation of the worker."""
    asks, crowd = everyday(block)[0].asks, everyday(block)[4].asks
    return [
        Phase(name="cold", asks=asks, loads=False),
        Phase(name="again", asks=asks, loads=True),
        Phase(name=f"after {operation}", asks=asks, loads=loads, before=operation),
        Phase(name="again", asks=asks, loads=True),
        Phase(name="crowd", asks=crowd, together=True, loads=True),
        # So that an engine without tiers shows how far its answers in a crowd are from those to one.
        Phase(name="one by one", asks=crowd),
    ]


def quickly_after(operation: str, block: int) -> list[Phase]:
    """The same in a few seconds."""
    cold, again, *_ = quick(block)
    return [cold, again, dataclasses.replace(cold, name=f"after {operation}", before=operation), again]


def other_adapter(block: int) -> list[Phase]:
    """The name of an adapter gets other content."""
    asks = _of_adapter(block)
    return [
        Phase(name="cold", asks=asks, loads=False),
        Phase(name="again", asks=asks, loads=True),
        Phase(name="other content", asks=asks, loads=False, before="other-adapter"),
        Phase(name="again", asks=asks, loads=True),
    ]


def _of_adapter(block: int) -> list[Ask]:
    return [Ask(name=f"a{number}", prompt=tokens(number, 7 * block + 3), adapter="a") for number in range(6)]


def ranks(block: int) -> list[Phase]:
    """Each data-parallel rank has tiers of its own."""
    asks = {
        rank: [
            Ask(name=f"r{rank}-{number}", prompt=tokens(number, 6 * block + 3), rank=rank)
            for number in range(6)
        ]
        for rank in (0, 1)
    }
    return [
        Phase(name="cold", asks=asks[0], loads=False),
        Phase(name="other rank", asks=asks[1]),
        *(Phase(name=f"again, rank {rank}", asks=found, loads=True) for rank, found in asks.items()),
        Phase(name="crowd", asks=[*asks[0], *asks[1]], together=True, loads=True),
    ]
