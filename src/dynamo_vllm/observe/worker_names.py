"""Names workers on the command line, and finds the workers that a command is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORT = 6


def short(found: Sequence[int]) -> dict[int, str]:
    """Return the shortest distinct prefixes of the instances' hexadecimal numbers."""
    whole = {instance: f"{instance:016x}" for instance in found}
    length = next(n for n in range(SHORT, 17) if len({name[:n] for name in whole.values()}) == len(whole))
    return {instance: name[:length] for instance, name in whole.items()}


def pick(found: Sequence[int], word: str) -> int:
    """Return the worker with this name: a row of the table, a prefix of an instance, or an instance."""
    if word.isdecimal() and not word.startswith("0") and int(word) <= len(found):
        return found[int(word) - 1]
    names = {instance: f"{instance:016x}" for instance in found}
    whole = [i for i in found if word.lower() in (str(i), f"{i:x}")]
    fits = whole or [i for i, name in names.items() if name.startswith(word.lower())]
    if len(fits) == 1:
        return fits[0]
    why = "matches several workers" if fits else "is not a worker"
    raise ConfigError(f"--worker {word} {why}; {_choices(fits or found)}")


def choose(found: Sequence[int], word: str | None, wants_all: bool) -> list[int]:
    """Return the workers to call. A single worker needs no name."""
    if word is not None:
        return [pick(found, word)]
    if wants_all or len(found) == 1:
        return list(found)
    raise ConfigError(f"there are {len(found)} workers; give --all or --worker ID; {_choices(found)}")


def _choices(found: Sequence[int]) -> str:
    names = short(found)
    return "'dynamo-vllm status' shows them: " + ", ".join(names[instance] for instance in found)
