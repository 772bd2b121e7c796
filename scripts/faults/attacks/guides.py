"""Scenarios of schemas that no compiler can handle, with a real engine: vLLM on CPU and the chat demo."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from faults.deployment import environment, pids, started, workers
from faults.others import CHAT, Others, of_demo_chat
from faults.scenario import Run, Scenario, Seen, needs_cpu_engine
from harness.misbehaving import some_of
from harness.served import Serving

LANES, LANE_MB, SPARE_MB = 2, 512, 300
"""Compilers at a time, what each may take (--guide-memory-mb), and what the rest may need meanwhile."""
SLOW = 4


@contextlib.contextmanager
def demo_chat(folder: Path, _: Path) -> Iterator[Serving]:
    # Two engines' threads on few cores only wait for each other.
    with started(folder, env=environment(folder, OMP_NUM_THREADS="1")) as serving:
        yield serving


def ask(url: str, schema: dict[str, Any]) -> httpx.Response:
    body = {
        "model": "demo-chat",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "max_tokens": 12,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    return httpx.post(url + CHAT, json=body, timeout=200)


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 400, f"{answer.status_code}: {answer.text[:200]}"
    assert "to compile" in answer.json()["message"], answer.text[:200]


def fresh(run: Run, k: int, which: int = 0) -> dict[str, Any]:
    """Returns one that was never checked: results are cached."""
    return some_of(k, f"r{run.number}x{which}x")


def freeze(run: Run) -> Seen:
    serving = run.sites.get(demo_chat)
    url, before = serving.stack.url, pids(serving)
    k = 800 + 40 * ((run.number - 1) % 21)
    with Others(url, of_demo_chat()) as others, ThreadPoolExecutor(1) as pool:
        others.go_on(1)
        others.longest_seconds = 0.0
        began, streamed = time.monotonic(), others.total
        assert_refused(pool.submit(ask, url, fresh(run, k)).result())
        took = time.monotonic() - began
        meanwhile = others.total - streamed
        others.go_on()
    assert meanwhile >= 1, f"nobody was answered in the {took:.1f} s"
    assert pids(serving) == before, "the worker was replaced"
    waited = others.longest_seconds
    return Seen(
        waited,
        f"k={k}: 400 after {took:.1f} s; {meanwhile} right answers meanwhile, longest pause {waited:.2f} s",
    )


def memory(run: Run) -> Seen:
    serving = run.sites.get(demo_chat)
    url, before = serving.stack.url, pids(serving)
    (worker,) = workers(serving)
    with Others(url, of_demo_chat()) as others, Memory(worker.pid) as used:
        assert_refused(ask(url, fresh(run, 6000)))
        others.go_on(1)
    assert used.grown_mb < LANES * LANE_MB + SPARE_MB, f"the worker's processes grew by {used.grown_mb} MB"
    assert pids(serving) == before, "the worker was replaced"
    return Seen(
        used.grown_mb,
        f"k=6000: 400; the worker's processes together had {used.before_mb} MB and took at most "
        f"{used.grown_mb} MB more; {others.total} right answers meanwhile",
    )


class Memory:
    """Samples what a process and all below it have; shared pages count once."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.before_mb = self._now()
        self.most_mb = self.before_mb

    @property
    def grown_mb(self) -> int:
        return self.most_mb - self.before_mb

    def _now(self) -> int:
        total = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total >> 20

    def _sample(self) -> None:
        while not self._stopping.wait(0.05):
            self.most_mb = max(self.most_mb, self._now())

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()


def starvation(run: Run) -> Seen:
    serving = run.sites.get(demo_chat)
    url, before = serving.stack.url, pids(serving)
    with Others(url, of_demo_chat(1)) as others, ThreadPoolExecutor(SLOW) as pool:
        began = time.monotonic()
        slow = [pool.submit(ask, url, fresh(run, 300 + 100 * which, which)) for which in range(SLOW)]
        waits = honest_until(run, url, slow)
        took = time.monotonic() - began
        statuses = Counter(one.result().status_code for one in slow)
        others.go_on(1)
    assert set(statuses) <= {400, 503}, f"slow ones get {dict(statuses)}"
    assert waits, "no small schema was answered meanwhile"
    assert pids(serving) == before, "the worker was replaced"
    return Seen(
        max(waits),
        f"{statuses[400]} slow ones refused, {statuses[503]} not checked in time (503), within {took:.1f} s; "
        f"{len(waits)} of {len(waits)} new small ones answered "
        f"meanwhile, slowest {max(waits):.2f} s; {others.total} plain answers right",
    )


def honest_until(run: Run, url: str, slow: list[Future[httpx.Response]]) -> list[float]:
    """Seconds that each small schema took, all different, while slow ones are checked."""
    waits: list[float] = []
    while not all(one.done() for one in slow):
        name = f"r{run.number}q{len(waits)}"
        began = time.monotonic()
        answer = ask(url, {"type": "object", "properties": {name: {"type": "integer"}}})
        assert answer.status_code == 200, f"a small schema gets {answer.status_code}: {answer.text[:200]}"
        if not all(one.done() for one in slow):
            waits.append(time.monotonic() - began)
    return waits


SCENARIOS = (
    Scenario(
        "schema-freeze",
        "a JSON schema of which some of 800 to 1600 properties must be there: a 400 in time, streams go on",
        freeze,
        needs_cpu_engine,
    ),
    Scenario(
        "schema-memory",
        "the same with 6000 properties: a 400, memory stays bounded",
        memory,
        needs_cpu_engine,
    ),
    Scenario(
        "schema-starvation",
        f"{SLOW} slow schemas at once: small schemas are answered meanwhile",
        starvation,
        needs_cpu_engine,
    ),
)
