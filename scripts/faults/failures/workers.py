"""Faults of workers behind one frontend: two under `serve`, with the fake engine."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from faults.deployment import fake_words, pids, started, workers
from faults.load import Load, long_answers
from faults.scenario import Counts, Fault, Run
from harness.served import Serving
from harness.stack import Worker
from harness.waiting import until

CLIENTS, TOKENS = 4, 100
WORKERS = 2
IN_FLIGHT = "dynamo_component_requests_in_flight"
DRAINED, MOVED = "drained in", "the drain time is over: "
HUNG = "did not answer for"


@contextlib.contextmanager
def two_fakes(folder: Path, model: Path) -> Iterator[Serving]:
    """Answers take a second, of which a drain allows five."""
    with _two_fakes(folder, model, "--drain-seconds", "5", "--hang-seconds", "5") as serving:
        yield serving


@contextlib.contextmanager
def two_hasty_fakes(folder: Path, model: Path) -> Iterator[Serving]:
    """A drain is shorter than the answers."""
    with _two_fakes(folder, model, "--drain-seconds", "0.2") as serving:
        yield serving


@contextlib.contextmanager
def _two_fakes(folder: Path, model: Path, *words: str) -> Iterator[Serving]:
    words = ("--workers", str(WORKERS), *words)
    with started(folder, *fake_words(model, *words, token_ms=1000 / TOKENS)) as serving:
        yield serving


def is_whole(serving: Serving, without: Collection[int] = ()) -> bool:
    """As many workers as there should be, none of them one that was ended."""
    found = pids(serving)
    if len(found) != WORKERS or set(found) & set(without):
        return False
    return len(serving.stack.instances()) == WORKERS


def busy(serving: Serving) -> Worker:
    """The oldest of those that answer somebody at this moment: `serve` replaces it without a pause."""
    found = until("a busy worker", lambda: [w for w in workers(serving) if w.metric(IN_FLIGHT)])
    return min(found, key=lambda worker: psutil.Process(worker.pid).create_time())


def ended(serving: Serving, number: signal.Signals) -> Counts:
    """One worker gets the signal in mid-stream."""
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        victim = busy(serving).pid
        load.fault()
        os.kill(victim, number)
        load.recovered(lambda: is_whole(serving, without=[victim]))
    return load.counts()


def logged(serving: Serving, line: str) -> int:
    """How often any worker said it."""
    return sum(log.read_text().count(line) for log in workers(serving)[0].log.glob("worker-*.log"))


def killed(run: Run) -> Counts:
    return ended(run.sites.get(two_fakes, WORKERS), signal.SIGKILL)


def drained(run: Run) -> Counts:
    serving = run.sites.get(two_fakes, WORKERS)
    before = logged(serving, DRAINED)
    counts = ended(serving, signal.SIGTERM)
    assert logged(serving, DRAINED) == before + 1, "the worker was not drained"
    assert logged(serving, MOVED) == 0, "requests had to move"
    return counts


def moved(run: Run) -> Counts:
    serving = run.sites.get(two_hasty_fakes, WORKERS)
    before = logged(serving, MOVED)
    counts = ended(serving, signal.SIGTERM)
    assert logged(serving, MOVED) == before + 1, "no request had to move"
    return counts


def hung(run: Run) -> Counts:
    serving = run.sites.get(two_fakes, WORKERS)
    before = serving.process.written().count(HUNG)
    counts = ended(serving, signal.SIGSTOP)
    assert serving.process.written().count(HUNG) == before + 1, "`serve` did not say that it hung"
    return counts


def rolling(run: Run) -> Counts:
    """The second one leaves when the first one is replaced."""
    serving = run.sites.get(two_hasty_fakes, 1)
    victims = pids(serving)
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        load.fault()
        for number, victim in enumerate(victims, 1):
            os.kill(victim, signal.SIGTERM)
            until("its replacement", functools.partial(is_whole, serving, victims[:number]), 120)
        load.recovered()
    assert logged(serving, MOVED), "no request had to move"
    return load.counts()


SCENARIOS = (
    Fault(
        "worker-killed",
        "one of two workers gets SIGKILL in mid-stream: its answers go on elsewhere",
        killed,
    ),
    Fault(
        "worker-drained",
        "one of two workers gets SIGTERM in mid-stream: its answers end there, others begin elsewhere",
        drained,
    ),
    Fault(
        "worker-drained-late",
        "the same with a drain time shorter than the answers: they go on elsewhere",
        moved,
    ),
    Fault(
        "worker-hung",
        "one of two workers gets SIGSTOP in mid-stream: replaced after `--hang-seconds 5`, its answers go on",
        hung,
    ),
    Fault(
        "rolling-restart",
        "both workers get SIGTERM, one after the other, with a drain time shorter than the answers",
        rolling,
    ),
)
