"""Ten times as many clients as two workers have seats for: the fake engine, with a bounded queue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from faults.deployment import fake_words, pids, started, workers
from faults.failures.leaving import RUNNING, WAITING, is_idle
from faults.failures.workers import WORKERS
from faults.load import Load, long_answers
from faults.scenario import Counts, Fault, Run, Seen
from harness.served import Serving
from harness.stack import Worker
from harness.waiting import until

SEATS, QUEUE = 4, 4
"""Of each worker."""
TOKENS, TOKEN_MS = 25, 40
"""Slow: the seats are the limit, not the processors, which clients, frontend and workers share here."""
CAPACITY, TIMES = SEATS * WORKERS, 10
MEASURED_SECONDS, AGAIN_SECONDS = 8.0, 0.5
LEAST = 0.9
"""Of the right answers per second at capacity."""


@contextlib.contextmanager
def two_narrow(folder: Path, model: Path) -> Iterator[Serving]:
    spec = {"max_num_seqs": SEATS, "max_num_queued_reqs": SEATS + QUEUE, "token_ms": TOKEN_MS}
    with started(folder, *fake_words(model, "--workers", str(WORKERS), **spec)) as serving:
        yield serving


class Most:
    """The most requests that an engine had at a time, by many looks."""

    def __init__(self, watched: list[Worker]) -> None:
        self._workers = watched
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.requests = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopping.wait(0.2):
            for worker in self._workers:
                self.requests = max(self.requests, int(worker.metric(RUNNING) + worker.metric(WAITING)))


def measured(serving: Serving, clients: int) -> tuple[float, Counts]:
    """Right answers per second while so many ask, and what became of all requests."""
    requests = long_answers(CAPACITY, TOKENS) * (clients // CAPACITY)
    with Load(serving.url, requests, again_seconds=AGAIN_SECONDS) as load:
        until("right answers", lambda: load.right_answers() >= CAPACITY)
        began, before = time.monotonic(), load.right_answers()
        time.sleep(MEASURED_SECONDS)  # the time in which answers are counted
        goodput = (load.right_answers() - before) / (time.monotonic() - began)
    return goodput, load.counts()


def overload(run: Run) -> Counts:
    """Both loads, in another order in the next run."""
    serving = run.sites.get(two_narrow)
    before, goodput, counts = pids(serving), dict[int, float](), dict[int, Counts]()
    loads = [CAPACITY, TIMES * CAPACITY]
    with Most(workers(serving)) as most:
        for clients in loads if run.number % 2 else reversed(loads):
            goodput[clients], counts[clients] = measured(serving, clients)
    ended = time.monotonic()
    until("nobody in the workers", lambda: all(map(is_idle, workers(serving))))
    idle_seconds = time.monotonic() - ended
    assert pids(serving) == before, "a worker was replaced"
    assert most.requests == SEATS + QUEUE, f"an engine had {most.requests} requests at a time"
    usual, under = (counts[clients] for clients in loads)
    assert not usual.failed, f"at capacity {usual.failed}"
    assert under.failed, "nobody was refused"
    ratio = goodput[loads[1]] / goodput[loads[0]]
    assert ratio >= LEAST, f"goodput is {ratio:.2f} of that at capacity, {goodput[loads[0]]:.1f}/s"
    return Counts(
        requests=usual.requests + under.requests,
        wrong=usual.wrong + under.wrong,
        failed=Counter(usual.failed) + Counter(under.failed),
        lost=usual.lost + under.lost,
        doubled=usual.doubled + under.doubled,
        longest_pause=under.longest_pause,
        recovered_seconds=idle_seconds,
        note=Seen(-ratio, f"goodput {ratio:.2f} of the {goodput[loads[0]]:.1f}/s at capacity"),
    )


SCENARIOS = (
    Fault(
        "overload",
        f"{TIMES} times as many clients as seats, which ask again after {AGAIN_SECONDS:g} s: goodput stays, "
        "queues are bounded",
        overload,
        explained={"503": "the engine's queue is full"},
    ),
)
