"""Tokens that travel together while a worker has many streams."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_vllm.errors import ClientBehind
from dynamo_vllm.job import Output
from dynamo_vllm.serving.request.pace import LONGEST_SECONDS, Gathering, Pace
from harness.fakes import Clock, FakeContext, make_worker, request
from harness.waiting import until_async

MANY = 100


class OneStream:
    """A stream among many, as `outlet` drives one."""

    def __init__(self, others: int = MANY, messages_per_second: int = 10_000) -> None:
        self.clock = Clock()
        self.pace = Pace(messages_per_second, self.clock)
        self.pace.count(others)
        self.gathering = Gathering(self.pace)
        self.sent: list[list[int]] = []
        self.error: Exception | None = None

    def tokens(self, *tokens: int) -> None:
        for token in tokens:
            self.out(Output([token]))

    def out(self, output: Output) -> None:
        if not self.sent:
            self.gathering.begin(self.out)
        elif self.pace.seconds and self.gathering.keeps(output):
            return
        if self.error is not None:
            raise self.error
        self.sent.append(list(output.token_ids))


async def test_few_streams_send_each_token_at_once() -> None:
    stream = OneStream(others=10)
    stream.tokens(*range(5))
    assert stream.sent == [[0], [1], [2], [3], [4]]


async def test_a_first_token_does_not_wait_and_later_ones_travel_together() -> None:
    stream = OneStream()
    stream.tokens(*range(3))
    assert stream.sent == [[0]]
    stream.clock.now += stream.pace.seconds
    stream.tokens(3, 4)
    assert stream.sent == [[0], [1, 2, 3]]


async def test_the_last_output_takes_along_what_waits() -> None:
    stream = OneStream()
    stream.tokens(*range(4))
    stream.out(Output([4], finish="length", finished=True))
    assert stream.sent == [[0], [1, 2, 3, 4]]


async def test_what_waits_is_sent_when_the_engine_makes_no_step() -> None:
    stream = OneStream()
    stream.tokens(*range(4))
    await until_async("the timer", lambda: len(stream.sent) == 2)
    assert stream.sent == [[0], [1, 2, 3]]


async def test_nothing_is_overtaken_when_the_other_streams_end() -> None:
    stream = OneStream()
    stream.tokens(*range(3))
    stream.pace.count(-MANY)
    stream.tokens(3, 4)
    await until_async("the timer", lambda: stream.pace.seconds == 0)
    stream.tokens(5)
    assert sum(stream.sent, []) == [0, 1, 2, 3, 4, 5]


async def test_a_client_that_is_too_far_behind_ends_the_job_with_its_next_token() -> None:
    stream = OneStream()
    stream.tokens(*range(3))
    stream.error = ClientBehind("it does not read")
    await until_async("the timer", lambda: stream.gathering._failure is not None)
    with pytest.raises(ClientBehind):
        stream.out(Output([3]))


async def test_an_ended_stream_sends_nothing_more() -> None:
    stream, other = OneStream(), OneStream()
    other.pace, other.gathering = stream.pace, Gathering(stream.pace)
    stream.tokens(*range(3))
    other.tokens(*range(3))
    stream.gathering.end()
    await until_async("the timer", lambda: len(other.sent) == 2)
    assert stream.sent == [[0]]


def test_the_wait_grows_with_the_streams_up_to_a_limit_and_zero_turns_it_off() -> None:
    pace, off, seconds = Pace(10_000), Pace(0), []
    for streams in (10, 100, 256, 5000, 10):
        for each in (pace, off):
            each.count(streams)
        seconds.append(pace.seconds)
        assert off.seconds == 0.0
        pace.count(-streams)
    assert seconds == [0.0, 0.01, 0.0256, LONGEST_SECONDS, 0.0]


async def test_a_busy_worker_sends_all_tokens_in_fewer_messages() -> None:
    """The same answers with and without, through the whole request path."""
    plain, plain_messages = await answers(Pace(0))
    paced, paced_messages = await answers(Pace(500))
    assert paced == plain
    assert plain_messages == STREAMS * TOKENS
    assert paced_messages < plain_messages / 2


STREAMS, TOKENS = 32, 20


async def answers(pace: Pace) -> tuple[list[list[int]], int]:
    worker = await make_worker()
    worker.serve(pace=pace)
    senders = await asyncio.gather(
        *(worker.generate(request(max_tokens=TOKENS), FakeContext(f"r{n}")) for n in range(STREAMS))
    )
    return [sender.tokens for sender in senders], sum(len(sender.chunks) for sender in senders)
