"""Requests with media over the fake engine: what they hold waits for room, and all of it comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from dynamo_vllm.engine.base import Pause, Resume
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.parts import PROCESSED_BYTES
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.media.base import MediaLimits
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.loader import Loader, make_loader
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.roles.media import MediaReader
from dynamo_vllm.serving.request.cancel import InFlight
from dynamo_vllm.serving.request.service import Service
from harness import media
from harness.fakes import FakeContext, FakeSender, request
from harness.waiting import until_async


@dataclass
class Worker:
    engine: FakeEngine
    loader: Loader
    service: Service

    async def hold(self, *requests: dict[str, Any]) -> list[asyncio.Task[None]]:
        """Requests that the engine has and does not go on with."""
        await self.engine.control(Pause())
        running = [self.start(raw) for raw in requests]
        await until_async("the engine to have them", lambda: len(self.engine.running) == len(running))
        return running

    async def ask(self, raw: dict[str, Any], context: FakeContext, sender: FakeSender | None = None) -> None:
        async for _ in self.service.generate(raw, context, sender or FakeSender()):
            raise AssertionError("push egress yields nothing")

    def start(self, raw: dict[str, Any], sender: FakeSender | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.ask(raw, FakeContext(), sender))

    @property
    def held(self) -> tuple[int, int]:
        """Bytes, and by how many."""
        return self.loader.memory.bytes, len(self.loader.memory)


@asynccontextmanager
async def worker(
    memory_bytes: int = 1 << 30, limits: MediaLimits | None = None, **spec: Any
) -> AsyncIterator[Worker]:
    engine = FakeEngine(FakeSpec(media={"image": 8}, **spec), lambda figures: None)
    facts = engine.facts

    async def nowhere(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    loader = make_loader(
        limits, reach=Reach(resolve=nowhere), at_once=4, threads=2, memory_bytes=memory_bytes
    )
    role = Aggregated(facts, None, MediaReader(facts, loader, engine.parts.media))
    yield Worker(engine, loader, Service(role, engine, InFlight(engine), lambda dead: None))
    await loader.aclose()


def picture(side: int) -> str:
    """Takes side * side * 4 bytes."""
    return media.data_url(media.picture(size=(side, side)))


def asked(*urls: str, **more: Any) -> dict[str, Any]:
    return {**request(), "multi_modal_data": {"image_url": [{"Url": url} for url in urls]}, **more}


async def test_media_are_held_until_the_first_token() -> None:
    async with worker(token_ms=5) as w:
        await w.engine.control(Pause())
        sender = FakeSender()
        running = w.start(
            {**asked(picture(10), picture(20)), "stop_conditions": {"max_tokens": 2000}}, sender
        )
        await until_async("the engine to have it", lambda: len(w.engine.running) == 1)
        assert w.held == (400 + 1600 + 2 * PROCESSED_BYTES, 1)
        await w.engine.control(Resume())
        await asyncio.wait_for(sender.first.wait(), 30)
        assert w.held == (0, 0)
        assert not running.done(), "the answer goes on"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_requests_wait_while_others_hold_all_there_is() -> None:
    async with worker(memory_bytes=500) as w:
        (first,) = await w.hold(asked(picture(20)))
        others = [w.start(asked(picture(side))) for side in (21, 22, 23)]
        await until_async("all to be loaded", lambda: len(w.loader.memory) == 4)
        await asyncio.sleep(0.05)
        assert len(w.engine.running) == 1 and w.loader.memory.bytes < 1600 + PROCESSED_BYTES + 4 * 500
        await w.engine.control(Resume())
        await asyncio.wait_for(asyncio.gather(first, *others), 30)
        assert w.held == (0, 0)


async def test_request_that_waits_too_long_for_room_is_told_to_come_again() -> None:
    from dynamo.llm import HttpError

    async with worker(500, MediaLimits(queue_seconds=0.1)) as w:
        (first,) = await w.hold(asked(picture(20)))
        with pytest.raises(HttpError) as caught:
            await w.ask(asked(picture(21)), FakeContext("r2"))
        assert caught.value.code == 503
        assert len(w.loader.memory) == 1
        await w.engine.control(Resume())
        await asyncio.wait_for(first, 30)
        assert w.held == (0, 0)


async def test_request_larger_than_all_there_is_is_served_alone() -> None:
    async with worker(memory_bytes=1) as w:
        large = [asked(*(picture(10 * n + side) for side in range(8))) for n in (1, 2, 3)]
        await asyncio.wait_for(asyncio.gather(*map(w.start, large)), 30)
        assert w.held == (0, 0)


async def test_same_picture_of_many_requests_is_held_once() -> None:
    async with worker(memory_bytes=1 << 20) as w:
        many = await w.hold(*[asked(picture(20))] * 5)
        assert w.held == (1600 + 5 * PROCESSED_BYTES, 5)
        await w.engine.control(Resume())
        await asyncio.gather(*many)
        assert w.held == (0, 0)


NO_PICTURE = media.data_url(b"no picture at all")
ENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "answered": (asked(picture(20)), {}),
    "one of its pictures is none": (asked(picture(20), NO_PICTURE), {}),
    "too long with its media": (asked(picture(20), token_ids=[5] * 4094), {}),
    "refused behind its media": (asked(picture(20), sampling_options={"temperature": -1.0}), {}),
    "engine dies": (asked(picture(20)), {"die_after": 0}),
}


@pytest.mark.parametrize("name", ENDS)
async def test_whatever_its_end_a_request_holds_nothing_after_it(name: str) -> None:
    raw, spec = ENDS[name]
    async with worker(**spec) as w:
        (failed,) = await asyncio.gather(w.start(raw), return_exceptions=True)
        assert (failed is None) == (name == "answered")
        assert w.held == (0, 0)


@pytest.mark.parametrize("leaves", ["client", "task"])
@pytest.mark.parametrize("url", ["data", "http://never.example/a.png"])
async def test_request_that_is_given_up_holds_nothing(leaves: str, url: str) -> None:
    """While it waits for the engine, or for its second picture."""
    async with worker(stall_after=0) as w:
        urls = [picture(20)] if url == "data" else [picture(20), url]
        context = FakeContext()
        running = asyncio.create_task(w.ask(asked(*urls), context))
        await until_async("what is loaded", lambda: w.loader.memory.bytes >= 1600)
        if url == "data":
            await until_async("the engine to have it", lambda: len(w.engine.running) == 1)
        if leaves == "client":
            context.stop()
        else:
            running.cancel()
        await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 30)
        assert w.held == (0, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_after_any_mixture_of_requests_nothing_is_held(seed: int) -> None:
    chance = random.Random(seed)
    async with worker(memory_bytes=chance.choice([1, 3000, 100_000]), token_ms=0.1) as w:

        async def one(number: int) -> None:
            pictures = [picture(chance.randint(2, 30)) for _ in range(chance.randint(1, 4))]
            if chance.random() < 0.2:
                pictures.append(NO_PICTURE)
            context = FakeContext(f"r{number}")
            running = asyncio.create_task(w.ask(asked(*pictures), context))
            if chance.random() < 0.4:
                await asyncio.sleep(chance.random() * 0.05)
                context.stop() if chance.random() < 0.5 else running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        await asyncio.wait_for(asyncio.gather(*map(one, range(20))), 60)
        assert w.held == (0, 0)
        last = [w.start(asked(*(picture(side) for side in range(40, 48)))) for _ in range(2)]
        await asyncio.wait_for(asyncio.gather(*last), 30)
        assert w.held == (0, 0)
