"""Which worker gets a request, and what happens when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo_vllm.serving.calls import caller as caller_module
from dynamo_vllm.serving.calls.caller import Call, Caller
from dynamo_vllm.serving.calls.card import WorkerCard
from dynamo_vllm.serving.calls.directory import Directory
from dynamo_vllm.serving.calls.failures import CallFailed, WorkerLost

CARD = {"models": ["m"], "kind": "pooling", "apis": ["score"], "address": "ns.c.generate"}


class Answers:
    """The workers of one namespace; a handler takes the instance and yields chunks."""

    def __init__(self, *instances: int) -> None:
        self.instances_here = list(instances)
        self.asked: list[int] = []
        self.contexts: list[Any] = []
        self.handler: Callable[[int], AsyncIterator[dict[str, Any]]] = one_chunk

    def endpoint(self, address: str) -> Any:
        return Endpoint(self, describes=address == "ns.tokens.convert")

    def directory(self) -> Directory:
        return Directory("ns", self.endpoint)


class Endpoint:
    def __init__(self, answers: Answers, *, describes: bool) -> None:
        self._answers = answers
        self._describes = describes

    async def client(self) -> Endpoint:
        return self

    async def wait_for_instances(self) -> list[int]:
        return self.instance_ids()

    def instance_ids(self) -> list[int]:
        return self._answers.instances_here

    def instances(self) -> list[Any]:
        return [Instance(number) for number in self._answers.instances_here]

    async def direct(
        self, request: Any, instance: int, annotated: bool = True, context: Any = None
    ) -> AsyncIterator[dict[str, Any]]:
        if self._describes:
            return describe()
        self._answers.asked.append(instance)
        self._answers.contexts.append(context)
        return self._answers.handler(instance)


class Instance:
    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id


async def describe() -> AsyncIterator[dict[str, Any]]:
    yield {"status": 200, "body": CARD}


async def one_chunk(instance: int) -> AsyncIterator[dict[str, Any]]:
    yield {"from": instance}


@asynccontextmanager
async def calling(answers: Answers) -> AsyncIterator[Caller]:
    async with answers.directory() as directory:
        yield Caller(directory)


def call(model: str = "m", api: str = "score") -> Call:
    return Call(model=model, api=api, body={"model": model}, request_id="r", metadata={"gateway": "a b c"})


async def test_requests_go_round_among_equal_workers() -> None:
    answers = Answers(1, 2, 3)
    async with calling(answers) as caller:
        for _ in range(6):
            await caller.whole(call())
    assert sorted(answers.asked[:3]) == sorted(answers.asked[3:]) == [1, 2, 3]
    assert answers.contexts[0].id() == "r" and answers.contexts[0].metadata["gateway"] == "a b c"


async def test_worker_with_fewer_requests_is_chosen() -> None:
    answers = Answers(1, 2)
    async with calling(answers) as caller:
        open_stream = caller.stream(call())
        busy = (await anext(open_stream))["from"]
        for _ in range(3):
            assert (await caller.whole(call()))[0]["from"] != busy
        await open_stream.aclose()
        assert busy in [(await caller.whole(call()))[0]["from"] for _ in range(2)]


async def test_lost_worker_is_replaced_once_and_then_the_last_choice() -> None:
    answers = Answers(1, 2, 3)
    gone: set[int] = set()

    async def handler(instance: int) -> AsyncIterator[dict[str, Any]]:
        if not gone:
            gone.add(instance)
        if instance in gone:
            raise ValueError("Unavailable: TCP connection to x failed")
        yield {"from": instance}

    answers.handler = handler
    async with calling(answers) as caller:
        found = [(await caller.whole(call()))[0]["from"] for _ in range(4)]
    assert not gone & set(found)
    assert len(answers.asked) == 5, "it is asked once"


@pytest.mark.parametrize(
    ("has_begun", "text", "error"),
    [
        (True, "Unavailable: Stream ended before generation completed", WorkerLost),
        (False, 'Unavailable: {"message":"busy","code":503}', CallFailed),
    ],
)
async def test_answer_that_has_begun_and_a_refusal_are_not_asked_for_again(
    has_begun: bool, text: str, error: type[CallFailed]
) -> None:
    answers = Answers(1, 2)

    async def handler(instance: int) -> AsyncIterator[dict[str, Any]]:
        if has_begun:
            yield {"from": instance}
        raise ValueError(text)

    answers.handler = handler
    async with calling(answers) as caller:
        with pytest.raises(error) as failed:
            await caller.whole(call())
    assert isinstance(failed.value, WorkerLost) is has_begun
    assert len(answers.asked) == 1


async def test_reader_that_leaves_stops_the_worker() -> None:
    answers = Answers(1)
    asked = asyncio.Event()

    async def handler(instance: int) -> AsyncIterator[dict[str, Any]]:
        asked.set()
        await asyncio.Event().wait()
        yield {}

    answers.handler = handler
    async with calling(answers) as caller:
        task = asyncio.create_task(caller.whole(call()))
        await asked.wait()
        assert not answers.contexts[0].is_stopped()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert answers.contexts[0].is_stopped()


async def test_what_nobody_offers_is_refused() -> None:
    for instances, model, api, status in (
        ((1,), "m", "embeddings", 400),
        ((1,), "other", "score", 404),
        ((), "m", "score", 503),
    ):
        async with calling(Answers(*instances)) as caller:
            with pytest.raises(CallFailed) as refused:
                await caller.whole(call(model, api))
        assert refused.value.status == status


async def test_worker_that_discovery_shows_a_moment_later_is_waited_for() -> None:
    """As the second of two workers at one address, just after the start."""
    answers = Answers(1)
    async with answers.directory() as directory:
        (card,) = await directory.having("m")
        client: Any = await directory.client(card.address)
        looks: list[list[int]] = [[2], [2], [1, 2]]
        client.instance_ids = lambda: looks.pop(0) if len(looks) > 1 else looks[0]
        assert await Caller(directory).whole(call()) == [{"from": 1}]


async def test_worker_that_left_routing_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "SEEN_SECONDS", 0.1)
    answers = Answers(1)
    async with answers.directory() as directory:
        caller = Caller(directory)
        await caller.whole(call())
        (card,) = await directory.having("m")
        assert card == WorkerCard(**{**CARD, "models": ("m",), "apis": ("score",), "instance": 1})  # type: ignore[arg-type]
        client: Any = await directory.client(card.address)
        client.instance_ids = lambda: []
        with pytest.raises(WorkerLost):
            await caller.whole(call())
