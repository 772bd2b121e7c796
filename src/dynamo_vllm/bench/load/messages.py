"""What the bench and its client processes say to each other: msgpack with its length in front, over pipes."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from dynamo_vllm.bench.http.answers import Answer
from dynamo_vllm.bench.http.target import Target
from dynamo_vllm.bench.load.prompts import PromptSpec

LENGTH_BYTES = 8
_encode = msgspec.msgpack.encode
T = TypeVar("T")


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a load: closed loop with `concurrency`, open loop with `rate`, or the times of a trace."""

    name: str
    prompts: PromptSpec
    concurrency: int | None = None
    rate: float | None = None
    arrivals: str = "poisson"
    requests: int | None = None
    seconds: float | None = None
    warmup: int = 0


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Whom to ask, and which part of the work this client process does."""

    target: Target
    timeout: float
    part: int
    parts: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Get ready for a stage: make the prompts, connect, warm the server up."""

    stage: StageSpec


class Go(msgspec.Struct, frozen=True, tag=True):
    """Start at this moment of the monotonic clock."""

    at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave what is in flight and tell what there is."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    failed_warmups: list[str]


class StageProgress(msgspec.Struct, frozen=True, tag=True):
    ok: int
    failed: int
    in_flight: int
    events: int


class Done(msgspec.Struct, frozen=True, tag=True):
    answers: list[Answer]
    cpu_seconds: float
    """Processor time of the process in the stage."""
    late_seconds: float
    """How much later than due a request was sent, at worst."""


Order = Begin | Prepare | Go | Stop
Report = Ready | StageProgress | Done


def pack(message: Order | Report) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message; None when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
