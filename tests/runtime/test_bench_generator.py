"""A stage as one client process runs it, against a server in the same loop."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_vllm.bench.http.stream_client import StreamClient
from dynamo_vllm.bench.http.target import parse_target
from dynamo_vllm.bench.load import messages, trace
from dynamo_vllm.bench.load.generator import Stage
from dynamo_vllm.bench.load.prompts import PromptSpec
from harness import sse


def spec(kind: str = "random", turns: int = 1, requests_of_trace: int = 0, **more: Any) -> messages.StageSpec:
    prompts = PromptSpec(
        kind=kind,
        api="completions",
        model="tiny",
        input_tokens=8,
        output_tokens=3,
        vocab=(10, 900),
        turns=turns,
        requests=[trace.TraceRequest(n * 0.02, 8, 3, [n], 8) for n in range(requests_of_trace)],
    )
    return messages.StageSpec(name="stage", prompts=prompts, **more)


class Peak:
    """Answers like a server, and remembers how many were in flight at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __call__(self, request: sse.Request) -> Iterator[bytes]:
        self.now += 1
        self.most = max(self.most, self.now)
        yield from sse.answer(request)
        self.now -= 1


async def ran(stage: messages.StageSpec, script: sse.Script = sse.answer) -> tuple[Stage, sse.Server]:
    run, server, _ = await timed(stage, script)
    return run, server


async def timed(
    stage: messages.StageSpec, script: sse.Script = sse.answer
) -> tuple[Stage, sse.Server, list[float]]:
    """And how long after its begin each request was sent."""
    async with sse.scripted(script) as server:
        client = StreamClient(parse_target(server.url), "/v1/completions", 60)
        run = Stage(stage, client, 0, 1)
        assert await run.prepare() == []
        began = time.monotonic()
        await run.run(began)
        client.close()
    return run, server, sorted(answer.sent - began for answer in run.answers)


def texts(server: sse.Server) -> list[Any]:
    return [request.body["prompt"] for request in server.asked]


async def test_closed_loop_keeps_as_many_in_flight_as_asked_and_no_more() -> None:
    peak = Peak()
    run, server = await ran(spec(concurrency=4, requests=20), peak)
    assert (len(run.answers), run.failed, run.tokens) == (20, 0, 60)
    assert (peak.most, server.connections) == (4, 4)
    assert len({str(prompt) for prompt in texts(server)}) == 20


async def test_time_ends_a_stage_too() -> None:
    run, _, sent = await timed(spec(concurrency=2, seconds=0.2))
    assert sent and not run.failed
    # Where the machine stops between a look at the clock and what follows, each of the two may send one more.
    assert sum(after > 0.2 for after in sent) <= 2


@pytest.mark.parametrize(
    ("stage", "least"),
    [
        (spec(rate=100.0, arrivals="even", requests=10), 0.08),
        (spec("trace", requests_of_trace=10, requests=10), 0.17),
    ],
    ids=["open loop", "trace"],
)
async def test_requests_are_sent_when_they_are_due(stage: messages.StageSpec, least: float) -> None:
    _, _, sent = await timed(stage)
    assert len(sent) == 10
    assert sent[-1] >= least
    # The median, which a machine that stops once leaves as it is.
    assert statistics.median(later - sooner for sooner, later in itertools.pairwise(sent)) < 0.5


async def test_turns_follow_each_other_with_the_answer_between() -> None:
    run, server = await ran(spec("turns", turns=3, concurrency=1, requests=5))
    first, second, third, fourth, fifth = texts(server)
    assert second.startswith(first + "\n0 1 2 \n") and third.startswith(second)
    assert not fourth.startswith(first) and fifth.startswith(fourth), "the last conversation is cut"
    assert all(not answer.text for answer in run.answers), "texts are not kept"


@pytest.mark.parametrize("traced", [0, 5])
async def test_warm_up_is_sent_and_not_counted_and_gives_no_prompt_away(traced: int) -> None:
    kind: dict[str, Any] = {"kind": "trace", "requests_of_trace": traced} if traced else {"concurrency": 2}
    run, server = await ran(spec(**kind, requests=5, warmup=3))
    assert (len(run.answers), len(server.asked)) == (5, 8)
    assert len({str(prompt) for prompt in texts(server)}) == 8


@pytest.mark.parametrize("load", [{"concurrency": 1}, {"concurrency": 3}, {"concurrency": 8}, {"rate": 5.0}])
async def test_warm_up_is_whole_over_several_processes(load: dict[str, Any]) -> None:
    """With fewer in flight than there are processes, some have nothing to do."""
    async with sse.scripted(sse.answer) as server:
        for part in range(4):
            client = StreamClient(parse_target(server.url), "/v1/completions", 60)
            await Stage(spec(requests=8, warmup=6, **load), client, part, 4).prepare()
            client.close()
    assert len({str(prompt) for prompt in texts(server)}) == len(server.asked) == 6


async def test_failures_of_the_warm_up_are_told() -> None:
    async with sse.scripted(lambda _: [sse.plain(500, b'{"message": "no"}')]) as server:
        client = StreamClient(parse_target(server.url), "/v1/completions", 60)
        errors = await Stage(spec(concurrency=2, requests=4, warmup=3), client, 0, 1).prepare()
        client.close()
    assert errors == ["HTTP 500: no"] * 3


async def test_failure_ends_a_conversation() -> None:
    run, server = await ran(
        spec("turns", turns=3, concurrency=1, requests=6), lambda _: [sse.plain(500, b"{}")]
    )
    assert (len(run.answers), run.failed) == (2, 2)


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"rate": 200.0}])
async def test_stop_leaves_what_is_in_flight_and_keeps_what_is_done(load: dict[str, Any]) -> None:
    asked, answers = asyncio.Event(), iter(range(5))

    def script(request: sse.Request) -> Iterator[bytes]:
        if next(answers, None) is not None:
            yield from sse.answer(request)
            return
        asked.set()
        yield sse.HEAD  # and then nothing

    async with sse.scripted(script) as server:
        client = StreamClient(parse_target(server.url), "/v1/completions", 60)
        run = Stage(spec(seconds=60.0, **load), client, 0, 1)
        running = asyncio.create_task(run.run(time.monotonic()))
        await asked.wait()
        while len(run.answers) < 5:
            await asyncio.sleep(0)
        run.stop()
        done = await asyncio.wait_for(running, 30)
        client.close()
    assert sum(not answer.aborted for answer in done.answers) == 5
    assert any(answer.aborted for answer in done.answers)
    assert run.failed == 0
