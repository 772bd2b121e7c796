"""Requests of all kinds, mended and broken, over HTTP: each is answered, none harms the next.

The long one asks for as many seconds as DYNAMO_VLLM_FUZZ_SECONDS says and says with which seed it began; with
DYNAMO_VLLM_FUZZ_SEED it begins there again.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from harness.fuzz_bodies import BODIES
from harness.fuzz_odd import as_json, mutated
from harness.fuzz_verbs import TOKEN, verbs
from harness.fuzz_wire import Answer, Asked, ask, requests
from harness.maker import makers
from harness.stack import Stack, Worker, environment, stack
from harness.waiting import until
from runtime.conftest import fake
from runtime.test_routes import listed

SECONDS = float(os.environ.get("DYNAMO_VLLM_FUZZ_SECONDS", "120"))
HONEST = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 8}
CHAT = {"model": "text", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
OFTEN = ["/v1/chat/completions", "/v1/completions"]
OF_FRONTEND = st.sampled_from([*sorted(BODIES), *OFTEN * 4]).flatmap(
    lambda path: requests(path, as_json(mutated(BODIES[path])))
)
NOT_DONE = {501, 503, 529}
"""The only statuses from 500 on that docs/errors.md has for requests that no engine fails on."""
OF_VERBS = {501, 502, 503, 505}
"""On the system port: methods and versions of HTTP it does not know, and what its docs say of verbs."""


@dataclass
class Deployment:
    made: Stack
    pids: list[int]
    answers: list[str]

    @property
    def frontend(self) -> tuple[str, int]:
        return self.made.address, self.made.port

    @property
    def tiny(self) -> Worker:
        return self.made.workers[0]

    @property
    def system(self) -> tuple[str, int]:
        return self.tiny.address, self.tiny.system_port

    def honest(self) -> list[str]:
        """What two requests are answered that nothing is wrong with."""
        told = self.made.post("/v1/completions", HONEST)
        said = self.made.post("/v1/chat/completions", CHAT)
        assert (told.status_code, said.status_code) == (200, 200), (told.text, said.text)
        return [told.json()["choices"][0]["text"], said.json()["choices"][0]["message"]["content"]]

    def is_awake(self) -> bool:
        for verb in ("wake_up", "resume"):
            ask(self.system, Asked(f"/engine/{verb}", b"{}", headers=(TOKEN,)))
        return self.tiny.is_ready() and set(self.made.models()) >= {"tiny", "text"}

    def assert_well(self) -> None:
        """The same processes, nothing in flight, the right answers."""
        assert [process.poll() for process in self.made.processes] == [None] * len(self.pids)
        until("a worker that is awake", self.is_awake)
        in_flight = "dynamo_component_requests_in_flight"
        until("an end of all requests", lambda: not any(w.metric(in_flight) for w in self.made.workers))
        assert self.honest() == self.answers
        assert [worker.pid for worker in self.made.workers] == self.pids[1:]

    def used(self) -> list[tuple[int, int]]:
        """Of each process: its megabytes and its descriptors."""
        found = [psutil.Process(pid) for pid in self.pids]
        return [(process.memory_info().rss >> 20, process.num_fds()) for process in found]


@pytest.fixture(scope="module")
def deployment(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("fuzz")
    words = fake(model, context_length=256, adapters=2, media={"image": 2})
    words = (*words, "--enable-multimodal")
    with stack(folder) as made:
        made.start_frontend()
        secret = {"DYN_VLLM_ADMIN_TOKEN": TOKEN[1].split()[1]}
        made.start_worker(*words, "--lora-enabled", env=secret)
        apart = ("--endpoint", "dyn://dynamo.text.generate", "--use-vllm-tokenizer")
        made.start_worker(*words, "--served-model-name", "text", *apart)
        made.wait_ready()
        with makers(environment(made.folder), model):
            made.wait_listed("tiny", "text", "image", "video", "audio")
            running = Deployment(made, [process.pid for process in made.processes], [])
            running.answers = running.honest()
            yield running


def run(
    requests: st.SearchStrategy[Asked], check: Callable[[Asked], None], examples: int, start: int
) -> None:
    """As many of them; the smallest that fails is shown."""

    @seed(start)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(requests)
    def each(asked: Asked) -> None:
        check(asked)

    each()


def asked_of_frontend(deployment: Deployment) -> Callable[[Asked], None]:
    def check(asked: Asked) -> None:
        answer = ask(deployment.frontend, asked)
        assert answer.status or asked.ends_early or not answer.is_whole, "closed without an answer"
        assert answer.status < 500 or answer.status in NOT_DONE, answer
        if answer.status >= 500 and answer.is_whole:
            assert json.loads(answer.body)["message"], "without a reason"
        assert not set(answer.errors) - NOT_DONE - set(range(400, 500)), answer
        if not asked.ends_early:  # the frontend takes it for a client that left
            assert_whole(answer)

    return check


def assert_whole(answer: Answer) -> None:
    """A stream has its end, anything else that was taken is JSON or a file."""
    if answer.status != 200 or not answer.is_whole:
        return
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        last = answer.body.rstrip().rsplit(b"\n\n", 1)[-1]
        assert b"[DONE]" in last or b"response." in last, answer.body[-500:]
    elif kind.startswith("application/json"):
        json.loads(answer.body)


def asked_of_worker(deployment: Deployment) -> Callable[[Asked], None]:
    def check(asked: Asked) -> None:
        answer = ask(deployment.system, asked)
        assert answer.status or not answer.is_whole, "closed without an answer"
        assert answer.status < 500 or answer.status in OF_VERBS, answer
        if asked.path.startswith(("/engine/", "/v1/loras")):
            assert TOKEN in asked.headers or answer.status != 200, "a verb without the token"
            assert not answer.body or json.loads(answer.body)

    return check


def test_every_open_route_is_asked() -> None:
    open_routes = {
        route.split()[1]
        for route in listed("Routes of the frontend")
        if route.startswith("POST") and "busy" not in route
    }
    assert set(BODIES) == open_routes


def test_some_requests_to_the_frontend(deployment: Deployment) -> None:
    run(OF_FRONTEND, asked_of_frontend(deployment), 150, 1)
    deployment.assert_well()


def test_some_requests_to_the_system_port(deployment: Deployment) -> None:
    run(verbs(), asked_of_worker(deployment), 100, 1)
    deployment.assert_well()


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 900)
def test_requests_for_minutes(deployment: Deployment) -> None:
    first = int(os.environ.get("DYNAMO_VLLM_FUZZ_SEED", random.SystemRandom().randrange(10**6)))
    print(f"DYNAMO_VLLM_FUZZ_SEED={first}")
    until_then = time.monotonic() + SECONDS
    before: list[tuple[int, int]] = []
    for start in itertools.count(first):
        run(OF_FRONTEND, asked_of_frontend(deployment), 300, start)
        run(verbs(), asked_of_worker(deployment), 100, start)
        deployment.assert_well()
        before = before or deployment.used()
        if time.monotonic() > until_then:
            break
    after = deployment.used()
    print(f"{start - first + 1} rounds, MB and descriptors {before} → {after}")
    for (megabytes, descriptors), (most_mb, most_descriptors) in zip(after, before, strict=True):
        assert megabytes < most_mb + 200 and descriptors < most_descriptors + 40, (before, after)
