"""Tests two workers: the cache decides where a request goes, and a stopping worker loses no answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.streams import Load, prompt, stream, stream_text
from harness.stack import Stack, Worker, stack
from harness.waiting import until, until_spread
from harness.warm import Zygote

LONG = 1000
"""Tokens of an answer that is still on its way when somebody has found out who gives it."""


@pytest.fixture
def two_workers(warm: Zygote, model: Path, tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as made:
        made.start_frontend()
        warm.start_worker(made, model, "--drain-seconds", "1")
        warm.start_worker(made, model, "--drain-seconds", "1")
        yield made.wait_ready(120)


def who(answer: Any) -> int:
    return int(answer.model_extra["nvext"]["worker_id"]["decode_worker_id"])


def ask(made: Stack, number: int, length: int = 640, max_tokens: int = 2) -> Any:
    return made.openai.completions.create(
        model="tiny",
        prompt=prompt(number, length),
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"nvext": {"extra_fields": ["worker_id", "timing"]}, "ignore_eos": True},
    )


def test_repeats_go_to_the_warm_worker(two_workers: Stack) -> None:
    first = until_spread(lambda number: ask(two_workers, number), who, least=12)
    again = [ask(two_workers, number) for number in range(len(first))]
    hits = [
        who(a) == who(b) and b.usage.prompt_tokens_details.cached_tokens >= 608
        for a, b in zip(first, again, strict=True)
    ]
    assert all(hits), hits


def test_rolling_restart_under_load_loses_nothing(two_workers: Stack, warm: Zygote, model: Path) -> None:
    """The drain budget is shorter than the answers, so requests also migrate in mid-stream."""
    undisturbed = {number: stream_text(two_workers, number) for number in range(4)}
    with Load(two_workers) as load:
        for worker in list(two_workers.workers):
            load.settled()
            worker.signal(signal.SIGTERM)
            assert worker.process.wait(60) == 0, worker.log.read_text()[-2000:]
            fresh = warm.start_worker(two_workers, model, "--drain-seconds", "1")
            until("the replacement", fresh.is_ready, 120)
            until("both in discovery", lambda: len(two_workers.instances()) == 2)
        load.settled()
    assert load.failures == []
    assert len(load.texts) >= 12
    assert all(text == undisturbed[number] for number, text in load.texts)


def busy_worker(made: Stack) -> Worker:
    def find() -> Worker | None:
        return next((w for w in made.workers if w.metric("dynamo_component_requests_in_flight") > 0), None)

    found = until("a busy worker", find)
    assert found is not None
    return found


def test_killed_worker_in_mid_stream(two_workers: Stack) -> None:
    """The stream continues on the other worker; text and usage equal those of an undisturbed run."""
    undisturbed = list(stream(two_workers, 9, LONG))
    text, chunks = "", iter(stream(two_workers, 9, LONG))
    for _ in range(20):
        text += next(chunks).choices[0].text
    os.killpg(busy_worker(two_workers).pid, signal.SIGKILL)
    usage = None
    for chunk in chunks:
        text += chunk.choices[0].text if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == "".join(c.choices[0].text for c in undisturbed if c.choices)
    wanted = undisturbed[-1].usage
    assert usage is not None and wanted is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, LONG)
    assert usage.prompt_tokens_details is not None, "cached tokens are told of a moved request too"
    assert (wanted.prompt_tokens, wanted.completion_tokens) == (40, LONG)
