"""Defines what the modules of the mirror tell each other: workers, overlaps, loads, weights."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

DEVICE, HOST, DISK = range(3)


class Worker(NamedTuple):
    """What the router chooses: one data-parallel rank of one worker."""

    instance: int
    rank: int = 0


class Overlap(NamedTuple):
    """Leading blocks of a prompt that a worker has, each in the nearest tier that continues the run."""

    device: int = 0
    host: int = 0
    disk: int = 0


NONE = Overlap()


class Load(NamedTuple):
    """What a worker was doing when a request was routed, without that request."""

    requests: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that it still had to compute."""
    blocks: int = 0
    """Blocks of its active requests and of the routed one together, each counted once."""


class Weights(msgspec.Struct, frozen=True):
    """The settings of a frontend's router; the defaults are those of `dynamo-vllm frontend`."""

    router: str = "kv"
    overlap: float = 16.0
    credit: float = 1.5
    host: float = 0.75
    disk: float = 0.25
    request_blocks: float = 256.0
    temperature: float = 0.0
    uses_events: bool = True
    tracks_output: bool = False

    @property
    def is_recomputable(self) -> bool:
        """Whether the choice follows from KV events and loads alone."""
        return self.router == "kv" and self.uses_events and not (self.temperature or self.tracks_output)


class Frontend(NamedTuple):
    """Who routed a request. Frontends without --router-replica-sync know only their own requests."""

    name: str
    weights: Weights = Weights()
    is_synced: bool = False
