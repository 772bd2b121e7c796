"""Provides helpers for tests of several data-parallel ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import psutil

from cpu.completions import Completion, complete, complete_all, texts
from cpu.streams import prompt
from harness.stack import Stack, Worker

QUICK_WATCH = ("--health-seconds", "0.5", "--canary-seconds", "1", "--canary-timeout-seconds", "2")
TWO_RANKS = ("--data-parallel-size", "2")
PROMPTS = [prompt(number, 640) for number in range(12)]


def expected_texts(alone: Stack) -> list[str]:
    """The answers of one engine."""
    return texts(complete(alone, prompt) for prompt in PROMPTS)


def assert_repeats_hit(made: Stack, ranks: set[int]) -> list[Completion]:
    """Checks that every repeat goes to the rank with its prefix, and that all ranks are used."""
    first = complete_all(made, PROMPTS, at_once=4)
    assert {answer.rank() for answer in first} == ranks
    again = [complete(made, prompt) for prompt in PROMPTS]
    assert [(a.rank(), a.cached >= 608) for a in again] == [(a.rank(), True) for a in first]
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
            chunk: Any = next(stream)  # not over iter(), which would close the stream when it is dropped
            ranks.add(chunk.model_extra["nvext"]["worker_id"]["decode_dp_rank"])
            streams.append(stream)
        assert ranks == {0, 1}
        yield streams
