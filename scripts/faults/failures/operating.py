"""Operators act while clients ask: they replace an adapter, or let a worker sleep; vLLM on CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from faults.deployment import real, workers
from faults.load import Answer, Load, long_answers
from faults.scenario import Counts, Fault, Run, needs_cpu_engine
from harness.adapters import make_adapter
from harness.served import Serving
from harness.stack import Worker
from harness.waiting import until

CLIENTS, TOKENS = 3, 50
PAUSE_SECONDS = 0.3
"""Between an answer and the next request, so that two cores have time for the adapters too."""
KEPT, REPLACED = "kept", "replaced"
"""Names of adapters."""
OLD, NEW = "old", "new"
"""Contents of the one that is replaced."""
MODELS = ("tiny", KEPT, REPLACED, REPLACED)
"""Of the clients."""


# --- an adapter that is replaced --------------------------------------------------------------------------


@dataclass
class Adapters:
    """A deployment with them, and what its clients got from each content in a quiet moment."""

    serving: Serving
    contents: dict[str, Path]
    expected: list[list[Answer]] = field(default_factory=list)


@contextlib.contextmanager
def with_adapters(folder: Path, model: Path) -> Iterator[Adapters]:
    made = {name: make_adapter(folder / name, model, seed=n) for n, name in enumerate((KEPT, OLD, NEW), 1)}
    with real(folder, model, "--workers", "2", "--enable-lora", "--max-loras", "2") as serving:
        for worker in workers(serving):
            load_adapter(worker, KEPT, made[KEPT])
            load_adapter(worker, REPLACED, made[OLD])
        serving.stack.wait_listed(KEPT, REPLACED)
        yield Adapters(serving, made)


def load_adapter(worker: Worker, name: str, folder: Path) -> None:
    done(worker.admin("load_lora", lora_name=name, source={"uri": str(folder)}))


def replace(serving: Serving, content: Path) -> None:
    """On one worker after the other, as `dynamo-vllm lora` does with --worker."""
    for worker in workers(serving):
        done(worker.admin("unload_lora", lora_name=REPLACED))
        load_adapter(worker, REPLACED, content)


def done(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


def adapter_replaced(run: Run) -> Counts:
    site: Adapters = run.sites.get(with_adapters)
    load = Load(
        site.serving.url,
        [long_answers(n + 1, TOKENS, m)[n] for n, m in enumerate(MODELS)],
        pause=PAUSE_SECONDS,
    )
    if not site.expected:
        learn(site, load)
    for client, expected in zip(load.clients, site.expected, strict=True):
        client.expected[:] = expected
    with load:
        load.in_full_swing()
        load.fault()
        for which, content in ((1, NEW), (0, OLD)):
            replace(site.serving, site.contents[content])
            assert_content(load, which)
        load.recovered()
    return load.counts()


def learn(site: Adapters, load: Load) -> None:
    load.learn()
    for content in (NEW, OLD):
        replace(site.serving, site.contents[content])
        site.serving.stack.wait_listed(REPLACED)
        load.learn()
    site.expected = [[*client.expected] for client in load.clients]
    found = [len(expected) for expected in site.expected]
    assert found == [1 + (model == REPLACED) for model in MODELS], f"different texts: {found}"


def assert_content(load: Load, which: int) -> None:
    """Requests that begin now get the new content alone."""
    since = time.monotonic()
    asking = [number for number, client in enumerate(load.clients) if len(client.expected) > 1]

    def texts(number: int) -> list[str]:
        return [a.text for a in list(load.answers) if a.client == number and a.began >= since and a.text]

    until("answers of the other content", lambda: all(texts(number) for number in asking), 120)
    for number in asking:
        right = load.clients[number].expected[which].text
        assert all(right.startswith(text) for text in texts(number)), "text of a content that is gone"


# --- sleep ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_workers(folder: Path, model: Path) -> Iterator[Serving]:
    with real(folder, model, "--workers", "2", "--drain-seconds", "20") as serving:
        yield serving


@contextlib.contextmanager
def one_worker(folder: Path, model: Path) -> Iterator[Serving]:
    with real(folder, model) as serving:
        yield serving


def one_of_two_asleep(run: Run) -> Counts:
    """Each of them in turn, at levels 1 and 2 in turn."""
    serving = run.sites.get(two_workers)
    sleeper = workers(serving)[run.number % 2]
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        load.fault()
        done(sleeper.admin("sleep", level=1 + run.number // 2 % 2))
        assert sleeper.health() == 503 and sleeper.busy() == 0
        load.all_answered()
        done(sleeper.admin("wake_up"))
        load.recovered(lambda: sleeper.is_ready() and len(serving.stack.instances()) == 2)
    return load.counts()


def only_one_asleep(run: Run) -> Counts:
    serving = run.sites.get(one_worker)
    (sleeper,) = workers(serving)
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        load.fault()
        done(sleeper.admin("sleep", level=1 + run.number % 2))
        until(
            "a refusal for each", lambda: {a.client for a in load.answers if a.failure} == {*range(CLIENTS)}
        )
        done(sleeper.admin("wake_up"))
        load.recovered(lambda: sleeper.is_ready() and len(serving.stack.instances()) == 1)
    return load.counts()


SCENARIOS = (
    Fault(
        "adapter-replaced",
        "an adapter gets other content and then its own again on both workers: each text is of one content, "
        "those of others stay",
        adapter_replaced,
        needs_cpu_engine,
    ),
    Fault(
        "sleep-one",
        "one of two workers sleeps and wakes: the other one answers meanwhile",
        one_of_two_asleep,
        needs_cpu_engine,
    ),
    Fault(
        "sleep-only",
        "the only worker sleeps and wakes: 503 meanwhile, the same answers afterwards",
        only_one_asleep,
        needs_cpu_engine,
        explained={"503": "the frontend has no worker while the only one sleeps"},
    ),
)
