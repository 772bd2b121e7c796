"""Provides helpers for tests of several data-parallel ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from harness.stack import Stack, Worker

QUICK_WATCH = ("--health-seconds", "0.5", "--canary-seconds", "1", "--canary-timeout-seconds", "2")


def prompt(number: int, length: int) -> list[int]:
    return [10 + (number * 97 + i * 13) % 850 for i in range(length)]


def ask(made: Stack, number: int, length: int = 640, max_tokens: int = 8) -> Any:
    return made.openai.completions.create(
        model="tiny",
        prompt=prompt(number, length),
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"nvext": {"extra_fields": ["worker_id"]}, "ignore_eos": True},
    )


def ask_all(made: Stack, count: int = 12) -> list[Any]:
    """Sends all requests at once, so that the router spreads them over all ranks."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: ask(made, number), range(count)))


def rank(answer: Any) -> int:
    return int(answer.model_extra["nvext"]["worker_id"]["decode_dp_rank"])


def texts(answers: list[Any]) -> list[str]:
    return [answer.choices[0].text for answer in answers]


def assert_repeats_hit(made: Stack, ranks: set[int]) -> list[Any]:
    """Checks that every repeat goes to the rank with its prefix, and that all ranks are used."""
    first = ask_all(made)
    assert {rank(answer) for answer in first} == ranks
    again = [ask(made, number) for number in range(len(first))]
    hits = [
        rank(a) == rank(b) and b.usage.prompt_tokens_details.cached_tokens >= 608
        for a, b in zip(first, again, strict=True)
    ]
    assert hits == [True] * len(first)
    assert texts(again) == texts(first)
    return first


def core(worker: Worker, rank: int) -> psutil.Process:
    """Returns the engine core of a rank, as vLLM's log names it."""
    found = re.search(rf"EngineCore_DP{rank} pid=(\d+)", worker.log.read_text())
    assert found is not None
    return psutil.Process(int(found[1]))


@contextlib.contextmanager
def stream_on_each(made: Stack, max_tokens: int) -> Iterator[list[Any]]:
    """Starts one stream on rank 0 and one on rank 1, each until its first token."""
    with contextlib.ExitStack() as held:
        streams, ranks = [], set()
        for number in range(2):
            stream = made.openai.completions.create(
                model="tiny",
                prompt=prompt(20 + number, 40),
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                extra_body={"nvext": {"extra_fields": ["worker_id"]}, "ignore_eos": True},
            )
            held.callback(stream.close)
            ranks.add(rank(next(stream)))  # not over iter(), which would close the stream when it is dropped
            streams.append(stream)
        assert ranks == {0, 1}
        yield streams
