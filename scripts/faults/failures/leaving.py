"""Clients that leave in every phase of a request, with a fake and with a real engine."""

from __future__ import annotations

import contextlib
import functools
import json
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from faults.deployment import fake_words, pids, started, workers
from faults.failures.engines import engine_words, environment_of_engines
from faults.failures.workers import IN_FLIGHT
from faults.load import Load, long_answers
from faults.others import COMPLETIONS
from faults.scenario import Counts, Fault, Run, Seen, needs_cpu_engine
from harness.served import Serving
from harness.stack import Worker
from harness.waiting import until

OTHERS, TOKENS = 2, 50
SEATS, LEAVERS = 4, 4
RUNNING, WAITING = "dynamo_component_requests_running", "dynamo_component_requests_waiting"
PHASES = ("connecting", "in prefill", "queued", "between tokens", "at the end")
ROUNDS, KEPT_MB = 4, 16
"""What the worker may have more after all rounds than after the first."""


@contextlib.contextmanager
def narrow_fake(folder: Path, model: Path) -> Iterator[Serving]:
    limits = {"max_num_seqs": SEATS, "max_num_queued_reqs": 100}
    with started(folder, *fake_words(model, token_ms=10, prefill_ms=500, **limits)) as serving:
        yield serving


@contextlib.contextmanager
def narrow_engine(folder: Path, model: Path) -> Iterator[Serving]:
    """It computes prompts in many small steps."""
    words = (*engine_words(model), "--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "32")
    with started(folder, *words, env=environment_of_engines(folder)) as serving:
        yield serving


class Asked:
    """A request over a connection of its own, of which as much is read as is asked for."""

    def __init__(
        self, serving: Serving, number: int, tokens: int, is_streamed: bool, prompt: int = 8
    ) -> None:
        body = {
            "model": "tiny",
            "prompt": [10 + (number * 37 + i * 13) % 800 for i in range(prompt)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": is_streamed,
        }
        self._content = json.dumps(body).encode()
        self._read = b""
        self.is_streamed = is_streamed
        self._socket = socket.create_connection((serving.stack.address, serving.stack.port), 60)

    def send_some(self) -> Asked:
        self._socket.sendall(self._whole()[:60])
        return self

    def send(self) -> Asked:
        self._socket.sendall(self._whole())
        return self

    def _whole(self) -> bytes:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(self._content)}\r\n\r\n".encode() + self._content

    def has_answer(self) -> bool:
        """Whether anything of it has come."""
        return bool(self._read) or bool(select.select([self._socket], [], [], 0)[0])

    def read(self, mark: bytes, times: int = 1) -> None:
        """Until this has come so often."""
        while self._read.count(mark) < times:
            more = self._socket.recv(65536)
            assert more, f"closed after {self._read[-300:]!r}"
            self._read += more

    def leave(self) -> None:
        self._socket.close()


def leave_in_every_phase(serving: Serving, worker: Worker, first: int) -> Counter[str]:
    """How many left in which phase; `first` makes prompts that no cache has."""
    left: Counter[str] = Counter()
    numbers = iter(range(first, first + 10 * LEAVERS))

    def some(tokens: int, prompt: int = 8) -> list[Asked]:
        return [Asked(serving, next(numbers), tokens, n % 2 == 0, prompt) for n in range(LEAVERS)]

    for one in [asked.send_some() for asked in some(100)]:
        one.leave()
        left["connecting"] += 1

    asked = [one.send() for one in some(100, prompt=1900)]
    until("requests in prefill", lambda: worker.metric(IN_FLIGHT) >= LEAVERS + OTHERS or began(asked))
    left["in prefill"] += leave(asked, lambda one: not one.has_answer())

    seated = [one.send() for one in some(1000)]
    until("full seats", lambda: worker.metric(RUNNING) == SEATS)
    queued = [one.send() for one in some(100)]
    until("a queue", lambda: worker.metric(WAITING) >= LEAVERS)
    left["queued"] += leave(queued, lambda one: not one.has_answer())
    for one in seated:
        if one.is_streamed:
            one.read(b"data: {", 3)
    left["between tokens"] += leave(seated, lambda _: True)

    asked = [one.send() for one in some(5)]
    for one in asked:
        one.read(b'"finish_reason":"length"')
    left["at the end"] += leave(asked, lambda _: True)
    return left


def began(asked: list[Asked]) -> bool:
    return any(one.has_answer() for one in asked)


def leave(asked: list[Asked], is_in_phase: Callable[[Asked], bool]) -> int:
    found = sum(map(is_in_phase, asked))
    for one in asked:
        one.leave()
    return found


def gone(run: Run, start: Callable[[Path, Path], Any]) -> Counts:
    serving = run.sites.get(start)
    (worker,) = workers(serving)
    before, left = pids(serving), Counter[str]()
    with Load(serving.url, long_answers(OTHERS, TOKENS)) as load:
        load.in_full_swing()
        load.fault()
        for number in range(ROUNDS):
            left += leave_in_every_phase(serving, worker, (run.number * ROUNDS + number) * 10 * LEAVERS)
            until("only the others", lambda: worker.metric(IN_FLIGHT) <= OTHERS)
            if number == 0:
                kept = psutil.Process(worker.pid).memory_info().rss
        load.recovered()
    until("nobody in the worker", functools.partial(is_idle, worker))
    grown = (psutil.Process(worker.pid).memory_info().rss - kept) / (1 << 20)
    assert grown < KEPT_MB, f"the worker has {grown:.0f} MB more than after the first round"
    assert set(left) == set(PHASES), f"nobody left {set(PHASES) - set(left)}"
    assert pids(serving) == before, "the worker was replaced"
    return replace(load.counts(), note=Seen(grown, f"{left.total()} clients left; worker +{grown:.1f} MB"))


def is_idle(worker: Worker) -> bool:
    return not any(worker.metric(name) for name in (IN_FLIGHT, RUNNING, WAITING))


_WHAT = "clients leave while they connect, in prefill, queued, between tokens, at the end; streamed or not"
SCENARIOS = (
    Fault("clients-gone", _WHAT, functools.partial(gone, start=narrow_fake)),
    Fault(
        "clients-gone-vllm",
        "the same with vLLM",
        functools.partial(gone, start=narrow_engine),
        needs_cpu_engine,
    ),
)
