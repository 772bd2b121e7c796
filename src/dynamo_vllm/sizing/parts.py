"""Describes a model as weights and caches: parameters per part, and how ranks share them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Part(StrEnum):
    """The name of a part of a model, for people."""

    EMBEDDINGS = "embeddings"
    HEAD = "head"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"
    ROUTER = "router"
    NORMS = "norms"
    VISION = "vision"
    ENCODER = "encoder"


class Split(StrEnum):
    """How the ranks of one engine share a weight."""

    WHOLE = "whole"  # each has all of it
    SHARDS = "shards"  # by tensor parallel ranks
    KV_HEADS = "kv heads"  # likewise, but a head is never cut
    EXPERTS = "experts"  # by all ranks, tensor parallel times data parallel


@dataclass(frozen=True, slots=True)
class Weight:
    part: Part
    count: int
    split: Split = Split.WHOLE
    is_linear: bool = False
    """Whether quantisation applies to it."""
    met: int | None = None
    """Of experts: the parameters that one token uses."""
    copied: bool = False
    """vLLM keeps a second copy of it in the model's dtype (MLA's kv_b_proj)."""
    is_float32: bool = False
    """Four bytes in every dtype."""
    bias: int = 0
    """Number of an expert's parameters that are biases, which quantisation leaves alone."""

    @property
    def active(self) -> int:
        return self.count if self.met is None else self.met


@dataclass(frozen=True, slots=True)
class Cache:
    """What one layer keeps of one token: heads that ranks share, or a latent that each of them has."""

    heads: int
    per_head: int
    """Values: a key and a value, or a latent with its rotated part."""
    window: int | None = None
    """Tokens a layer looks back; None for all."""

    def values(self, shards: int) -> int:
        """On one of so many tensor parallel ranks; a head is never cut."""
        return max(1, self.heads // shards) * self.per_head


@dataclass(frozen=True, slots=True)
class Layer:
    weights: tuple[Weight, ...]
    cache: Cache


def kinds(layers: Sequence[Layer]) -> list[tuple[Layer, int]]:
    """Each kind of layer, and how many there are: alike layers of a model are one object."""
    found = {id(layer): layer for layer in layers}
    counts = Counter(map(id, layers))
    return [(found[number], count) for number, count in counts.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    family: str
    hidden: int
    vocabulary: int
    max_len: int
    heads: int
    kv_heads: int
    """1 for a latent cache."""
    widths: tuple[int, ...]
    """Of the MLPs: what tensor parallelism divides."""
    expert_width: int = 0
    experts: int = 0
    chosen_experts: int = 0
    embeddings: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    ending: tuple[Weight, ...]
    vision: tuple[Weight, ...] = ()
    is_tied: bool = False
    next_token_layers: int = 0
    """Layers for speculative decoding, which are on disk and not loaded without it."""

    @property
    def weights(self) -> Iterator[Weight]:
        yield from self.embeddings
        for layer, count in kinds(self.layers):
            yield from times(layer.weights, count)
        yield from self.ending
        yield from self.vision

    @property
    def total(self) -> int:
        return sum(weight.count for weight in self.weights)

    @property
    def active(self) -> int:
        """Parameters that one token uses, with the embeddings."""
        return sum(weight.active for weight in self.weights)

    @property
    def has_cache(self) -> bool:
        """Whether it keeps keys and values of a request; encoders do not, and have no logits either."""
        return any(layer.cache.per_head for layer, _ in kinds(self.layers))

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    def by_part(self) -> dict[Part, int]:
        found = dict.fromkeys(Part, 0)
        for weight in self.weights:
            found[weight.part] += weight.count
        return {part: count for part, count in found.items() if count}


@dataclass(frozen=True, slots=True)
class Facts:
    """Reads a config.json one number at a time; an error names the file and the key."""

    values: Mapping[str, object]
    source: str

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of `names` that exists."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self.source}: {name} is {value!r}, not a whole number")
            return value
        if default is None:
            raise ConfigError(
                f"{self.source}: {' or '.join(names)} is missing; it cannot be counted without it"
            )
        return default

    def positive(self, *names: str, default: int | None = None) -> int:
        value = self.number(*names, default=default)
        if value == 0:
            raise ConfigError(f"{self.source}: {names[0]} is 0; it must be 1 or more")
        return value

    def optional(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.source}: {name} is missing; a model's config.json names it")
        return value

    def inner(self, name: str) -> Facts | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.source}: {name} is not a mapping")
        return Facts(value, f"{self.source}: {name}")

    def list(self, name: str) -> tuple[object, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise ConfigError(f"{self.source}: {name} is not a list")
        return tuple(value)


def matrix(part: Part, rows: int, columns: int, split: Split, *, has_bias: bool = False) -> Iterable[Weight]:
    """A linear layer."""
    yield Weight(part, rows * columns, split, is_linear=True)
    if has_bias:
        yield Weight(part, rows, split)


def times(weights: Iterable[Weight], count: int) -> tuple[Weight, ...]:
    """`count` layers with the same weights, as one."""
    return tuple(
        dataclasses.replace(
            weight,
            count=weight.count * count,
            bias=weight.bias * count,
            met=None if weight.met is None else weight.met * count,
        )
        for weight in weights
    )
