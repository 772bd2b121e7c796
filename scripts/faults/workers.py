"""Faults of workers behind one frontend: two under `serve`, with the fake engine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from faults.deployment import fake_words, pids, started, workers
from faults.load import Load, long_answers
from faults.scenario import Counts, Fault, Run
from harness.served import Serving
from harness.stack import Worker
from harness.waiting import until

CLIENTS, TOKENS = 4, 100
WORKERS = 2
IN_FLIGHT = "dynamo_component_requests_in_flight"


@contextlib.contextmanager
def two_fakes(folder: Path, model: Path) -> Iterator[Serving]:
    words = fake_words(model, "--workers", str(WORKERS), "--drain-seconds", "5", token_ms=10)
    with started(folder, *words) as serving:
        yield serving


def is_whole(serving: Serving, without: int = 0) -> bool:
    """As many workers as there should be, none of them the one that was ended."""
    found = pids(serving)
    return len(found) == WORKERS and without not in found and len(serving.stack.instances()) == WORKERS


def busy(serving: Serving) -> Worker:
    """One that answers somebody at this moment."""
    found = until("a busy worker", lambda: [w for w in workers(serving) if w.metric(IN_FLIGHT)])
    return found[0]


def killed(run: Run, number: signal.Signals = signal.SIGKILL) -> Counts:
    serving = run.sites.get(two_fakes)
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        victim = busy(serving).pid
        load.fault()
        os.kill(victim, number)
        load.recovered(lambda: is_whole(serving, without=victim))
    return load.counts()


SCENARIOS = (
    Fault(
        "worker-killed",
        "one of two workers gets SIGKILL in mid-stream: its answers go on elsewhere",
        killed,
    ),
)
