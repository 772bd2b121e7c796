"""Defines the messages between the bench and its client processes: length-prefixed msgpack over pipes."""

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
    """One stage of a load: a closed loop with `concurrency`, an open loop with `rate`, or a trace's times."""

    name: str
    prompts: PromptSpec
    concurrency: int | None = None
    rate: float | None = None
    arrivals: str = "poisson"
    requests: int | None = None
    seconds: float | None = None
    warmup: int = 0


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The server, and this client process's share of the work."""

    target: Target
    timeout: float
    part: int
    parts: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Prepare a stage: create the prompts, connect, warm the server up."""

    stage: StageSpec


class Go(msgspec.Struct, frozen=True, tag=True):
    """Start at this time of the monotonic clock."""

    at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Abort the requests in flight and report what is complete."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    failed_warmups: list[str]


class StageProgress(msgspec.Struct, frozen=True, tag=True):
    ok: int
    failed: int
    in_flight: int
    tokens: int
    """Of answered requests; of those in flight, the events so far: an event may bring several tokens."""
    first_tokens: list[float] = []
    """Seconds to the first token of requests that were answered since the last message."""


class Done(msgspec.Struct, frozen=True, tag=True):
    answers: list[Answer]
    cpu_seconds: float
    """CPU time of the process in the stage."""
    late_seconds: float
    """The longest delay with which a request was sent."""


Order = Begin | Prepare | Go | Stop
Report = Ready | StageProgress | Done


def pack(message: Order | Report) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Return the next message; None if the other side has closed the pipe."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
