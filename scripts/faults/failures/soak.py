"""Keeps mixed traffic going for long, and compares what processes hold early and late."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from faults.deployment import fake_words, pids, started, workers
from faults.failures.workers import IN_FLIGHT
from faults.others import CHAT, COMPLETIONS, Request, text_of
from faults.scenario import Run, Scenario, Seen
from harness.adapters import make_adapter
from harness.served import Serving
from harness.waiting import until

THREADS = 4
PAUSE_SECONDS = 1.0
"""Between two requests of one thread, to use little of the machine."""
SAMPLES = 30
"""Each taken in a pause of the traffic."""
PARTS = 6
"""Of the whole time: the second one, when all has settled, is compared with the last."""
MOST_GROWTH = 0.05
PLAIN = {"model": "tiny", "temperature": 0, "ignore_eos": True}


def completion(number: int, tokens: int) -> Request:
    return COMPLETIONS, {**PLAIN, "prompt": [20 + number % 50, 5, 6], "max_tokens": tokens}


def chat(number: int, tokens: int) -> Request:
    messages = [{"role": "user", "content": f"What is {number % 50} + 25?"}]
    return CHAT, {**PLAIN, "messages": messages, "max_tokens": tokens}


BAD: list[tuple[int, Request]] = [
    (400, (COMPLETIONS, {**PLAIN, "prompt": [20] * 5000, "max_tokens": 5})),
    (400, (COMPLETIONS, {**PLAIN, "prompt": [20], "max_tokens": -1})),
    (400, (CHAT, {**PLAIN, "messages": [], "max_tokens": 5})),
    (404, (COMPLETIONS, {**PLAIN, "model": "nobody", "prompt": [20], "max_tokens": 5})),
]


@dataclass
class Traffic:
    """Clients that ask one thing after another; the first failure of each is kept."""

    serving: Serving
    adapter: Path
    expected: dict[str, str] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        limits = httpx.Limits(
            max_keepalive_connections=0
        )  # an idle connection is a descriptor of the frontend
        self._http = httpx.Client(base_url=self.serving.url, timeout=60, limits=limits)
        self._locks = [threading.Lock() for _ in range(THREADS)]
        kinds = (self.short, self.stream, self.chat, self.cancelled, self.long, self.bad)
        self._threads = [
            threading.Thread(target=self._repeat, args=(n, (*kinds, self.adapters) if n == 0 else kinds))
            for n in range(THREADS)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(180)
        self._http.close()

    def _repeat(self, thread: int, kinds: tuple[Callable[[int], None], ...]) -> None:
        turns = itertools.cycle(kinds)
        for number in itertools.count(thread):
            if self.stopping.wait(PAUSE_SECONDS):
                return
            kind = next(turns)
            try:
                with self._locks[thread]:
                    kind(number)
            except (AssertionError, httpx.HTTPError) as exc:
                self.failures.append(f"{kind.__name__}: {exc!r}")
            self.done[kind.__name__] += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """All requests have ended, and no other begins."""
        with contextlib.ExitStack() as held:
            for lock in self._locks:
                held.enter_context(lock)
            until("idle workers", lambda: not any(one.metric(IN_FLIGHT) for one in workers(self.serving)))
            yield

    def short(self, number: int) -> None:
        path, body = completion(number, 3)
        reply = self._http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        self._check(body, text_of(reply.json()["choices"][0]))

    def stream(self, number: int) -> None:
        self._stream(completion(number, 50))

    def long(self, number: int) -> None:
        self._stream(completion(number, 400))

    def chat(self, number: int) -> None:
        self._stream(chat(number, 50))

    def cancelled(self, number: int) -> None:
        """The client leaves after a few events."""
        path, body = completion(number, 400)
        with self._http.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            for _ in itertools.islice(reply.iter_lines(), 5):
                pass

    def bad(self, number: int) -> None:
        status, (path, body) = BAD[number % len(BAD)]
        reply = self._http.post(path, json=body)
        assert reply.status_code == status, f"{reply.status_code}: {reply.text[:300]}"

    def adapters(self, number: int) -> None:
        """Loads one at one worker, asks it, and removes it again."""
        worker = sorted(workers(self.serving), key=lambda one: one.pid)[number % 2]
        name = f"adapter-{number}"
        loaded = worker.admin("load_lora", lora_name=name, source={"uri": str(self.adapter)})
        assert loaded.status_code == 200, loaded.text
        until("the adapter", lambda: name in self.serving.stack.models(), every=0.1)
        path, body = completion(number, 3)
        reply = self._http.post(path, json={**body, "model": name})
        assert reply.status_code == 200, reply.text
        removed = worker.admin("unload_lora", lora_name=name)
        assert removed.status_code == 200, removed.text

    def _stream(self, request: Request) -> None:
        path, body = request
        text, done = "", False
        with self._http.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    text += "".join(map(text_of, json.loads(line[6:])["choices"]))
                done = done or line == "data: [DONE]"
        assert done, "the stream has no end"
        self._check(body, text)

    def _check(self, body: dict[str, object], text: str) -> None:
        """The same request has the same answer, always."""
        assert text and text == self.expected.setdefault(json.dumps(body), text), f"{body}: {text!r}"


# --- what processes hold --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """By one process at one moment."""

    rss: int
    descriptors: int
    threads: int


def held(process: psutil.Process) -> Held:
    with process.oneshot():
        return Held(process.memory_info().rss, process.num_fds(), process.num_threads())


@dataclass(frozen=True)
class Growth:
    """Of one process, from one part of the time to the last: of the median memory, and of the fewest
    descriptors and threads, since the runtime keeps some of both for a while."""

    name: str
    rss: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, name: str, samples: list[Held]) -> Growth:
        length = len(samples) // PARTS
        early, late = samples[length : 2 * length], samples[-length:]

        memory = [statistics.median(one.rss for one in part) for part in (early, late)]
        descriptors = [min(one.descriptors for one in part) for part in (early, late)]
        threads = [min(one.threads for one in part) for part in (early, late)]
        return cls(name, memory[1] / memory[0] - 1, descriptors[1] - descriptors[0], threads[1] - threads[0])

    def check(self) -> None:
        assert self.rss < MOST_GROWTH, f"memory of {self}"
        assert self.descriptors <= 0, f"descriptors of {self}"
        assert self.threads <= 0, f"threads of {self}"

    def __str__(self) -> str:
        more = f"{self.descriptors:+d} descriptors, {self.threads:+d} threads"
        return f"{self.name}: {self.rss:+.1%} RSS, {more}"


def role_of(process: psutil.Process) -> str:
    """By the command of `dynamo-vllm` that it runs."""
    commands = ("serve", "frontend", "worker")
    return next((word for word in process.cmdline() if word in commands), process.name())


def observed(serving: Serving, traffic: Traffic, seconds: float) -> dict[str, list[Held]]:
    """Samples of every process while the traffic goes on."""
    found = serving.process.tree()
    names = {process.pid: f"{role_of(process)} {process.pid}" for process in found}
    samples: dict[str, list[Held]] = {name: [] for name in names.values()}
    for _ in range(SAMPLES):
        time.sleep(seconds / SAMPLES)  # between two looks
        assert not traffic.failures, f"{len(traffic.failures)} failed: {traffic.failures[0]}"
        with traffic.paused():
            for process in found:
                samples[names[process.pid]].append(held(process))
    return samples


def soak(run: Run) -> Seen:
    with two_with_adapters(run.folder, run.model) as (serving, adapter):
        before = pids(serving)
        busy = sum(sum(process.cpu_times()[:2]) for process in serving.process.tree())
        with Traffic(serving, adapter) as traffic:
            samples = observed(serving, traffic, run.soak_minutes * 60)
        busy = sum(sum(process.cpu_times()[:2]) for process in serving.process.tree()) - busy
        assert not traffic.failures, f"{len(traffic.failures)} failed: {traffic.failures[0]}"
        assert pids(serving) == before, "a worker was replaced"
    growths = [Growth.of(name, of_one) for name, of_one in samples.items()]
    for growth in growths:
        growth.check()
    worst = max(growths, key=lambda growth: growth.rss)
    kinds = ", ".join(f"{count} {kind}" for kind, count in traffic.done.items())
    return Seen(
        worst.rss,
        f"{run.soak_minutes:.0f} minutes, {busy / run.soak_minutes / 60:.2f} of a core: {kinds}, 0 wrong, "
        f"0 failed; most growth of {len(growths)} processes {worst.rss:+.1%} RSS, descriptors "
        f"{max(growth.descriptors for growth in growths):+d}, threads "
        f"{max(growth.threads for growth in growths):+d}",
    )


@contextlib.contextmanager
def two_with_adapters(folder: Path, model: Path) -> Iterator[tuple[Serving, Path]]:
    adapter = make_adapter(folder / "adapter", model)
    words = fake_words(model, "--workers", "2", "--lora-enabled", adapters=4)
    with started(folder, *words) as serving:
        yield serving, adapter


SCENARIOS = (
    Scenario(
        "soak",
        "30 minutes of streams, short, long and cancelled answers, bad input and adapters: nothing grows",
        soak,
        once=True,
    ),
)
