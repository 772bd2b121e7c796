"""Small real objects for tests of the request path without a runtime."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from dynamo_vllm.engine.base import Engine
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.errors import EngineDead
from dynamo_vllm.job import EngineFacts, Job, Output
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.roles.base import Role
from dynamo_vllm.serving.request.cancel import InFlight
from dynamo_vllm.serving.request.service import Service


class Clock:
    """Shows the time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def outputs(engine: Engine, job: Job) -> list[Output]:
    """Everything an engine answers."""
    found: list[Output] = []
    await engine.stream(job, found.append)
    return found


class FakeContext:
    """A request's context, stopped when the test says so."""

    def __init__(self, request_id: str = "r1") -> None:
        self._id = request_id
        self._is_stopped = False

    def id(self) -> str:
        return self._id

    def is_stopped(self) -> bool:
        return self._is_stopped

    def is_killed(self) -> bool:
        return False

    def stop(self) -> None:
        self._is_stopped = True


@dataclass
class FakeSender:
    """Keeps what was sent; `closed_after` is how many chunks it takes before the stream is closed."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    closed_after: int | None = None
    first: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, chunk: dict[str, Any]) -> None:
        if self.closed_after is not None and len(self.chunks) >= self.closed_after:
            raise RuntimeError("response stream is closed")
        self.chunks.append(chunk)
        self.first.set()

    def close(self) -> None:
        self.closed = True

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk["token_ids"]]


@dataclass
class FakeWorker:
    """The request path over the fake engine."""

    engine: FakeEngine
    facts: EngineFacts
    in_flight: InFlight
    service: Service
    deaths: list[EngineDead]

    async def generate(
        self, request: object, context: FakeContext | None = None, sender: FakeSender | None = None
    ) -> FakeSender:
        sender = sender or FakeSender()
        async for _ in self.service.generate(request, context or FakeContext(), sender):
            raise AssertionError("push egress yields nothing")
        return sender

    async def begin(
        self, prompt: list[int] | None = None, max_tokens: int = 4000, context: FakeContext | None = None
    ) -> tuple[asyncio.Task[FakeSender], FakeSender]:
        """A request that has its first token."""
        sender = FakeSender()
        running = asyncio.create_task(self.generate(request(prompt, max_tokens), context, sender))
        await sender.first.wait()
        return running, sender

    def serve(self, role: Role[Any] | None = None, **parts: Any) -> None:
        """Take another role, or other parts of the request path."""
        self.service = Service(
            role or self.service._role, self.engine, self.in_flight, self.deaths.append, **parts
        )


async def make_worker(**spec: Any) -> FakeWorker:
    engine = FakeEngine(FakeSpec(**spec), lambda figures: None)
    facts = engine.facts
    in_flight, deaths = InFlight(engine), list[EngineDead]()
    service = Service(Aggregated(facts), engine, in_flight, deaths.append)
    return FakeWorker(engine, facts, in_flight, service, deaths)


def request(prompt: list[int] | None = None, max_tokens: int | None = 4, **sampling: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "token_ids": prompt or [5, 6, 7],
        "stop_conditions": {"max_tokens": max_tokens},
        "sampling_options": sampling,
        "output_options": {},
        "routing": {"dp_rank": 0},
    }
