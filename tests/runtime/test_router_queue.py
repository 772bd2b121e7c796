"""What becomes of others while one request, whose first token does not come, keeps a worker busy."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from dynamo_vllm.models.tiny import make_tiny_model
from harness import metrics
from harness.stack import Stack, stack
from harness.waiting import until

STALLS = 99
# What this engine is said to compute in a quarter of a second is a quarter of its context.
SPEC = {"vocab_size": 1000, "stall_on_token": STALLS, "context_length": 256}


@dataclass
class Busy:
    """A deployment of one worker, with one request that hangs in its engine until its client leaves."""

    stack: Stack
    threads: ThreadPoolExecutor
    leaves: threading.Event

    def ask(self, token: int, tokens: int) -> Future[httpx.Response]:
        return self.threads.submit(self.stack.post, "/v1/completions", _body(token, tokens))

    def held(self) -> int:
        """Requests that wait for a first token, at the frontend or further on."""
        text = httpx.get(f"{self.stack.url}/metrics", timeout=30).text
        return int(metrics.total(text, "dynamo_frontend_queued_requests"))

    def arrived(self) -> int:
        """Requests that the worker has got."""
        return int(self.stack.workers[0].metric("dynamo_component_requests_total"))


def _body(token: int, tokens: int) -> dict[str, object]:
    return {"model": "tiny", "prompt": [token] * tokens, "max_tokens": 2}


@contextmanager
def busy(folder: Path, *flags: str) -> Iterator[Busy]:
    model = make_tiny_model(folder / "tiny")
    with stack(folder) as made, ThreadPoolExecutor() as threads:
        made.start_frontend(*flags)
        fake = ("--engine", "fake", "--fake-engine", json.dumps(SPEC))
        worker = made.start_worker("--model", str(model), "--served-model-name", "tiny", *fake)
        made.wait_ready()
        leaves = threading.Event()

        def hang() -> None:
            body = {**_body(STALLS, 200), "stream": True}
            with httpx.stream("POST", f"{made.url}/v1/completions", json=body, timeout=60):
                leaves.wait(60)

        threads.submit(hang)
        until("the request that hangs", lambda: worker.metric("dynamo_component_requests_in_flight") == 1)
        try:
            yield Busy(made, threads, leaves)
        finally:
            leaves.set()


def test_others_do_not_wait_for_a_request_that_hangs(tmp_path: Path) -> None:
    """One request must not keep a worker from all others: why the queue is off by default."""
    with busy(tmp_path) as made:
        assert made.ask(5, 200).result(60).status_code == 200


def test_queue_holds_requests_back_until_the_worker_can_take_them(tmp_path: Path) -> None:
    with busy(tmp_path, "--router-queue-seconds", "0.25") as made:
        before = made.arrived()
        long, short = made.ask(5, 200), made.ask(6, 10)
        until("both to be held back", lambda: made.held() == 3)
        assert (long.done(), short.done(), made.arrived()) == (False, False, before)
        made.leaves.set()
        assert [answer.result(60).status_code for answer in (long, short)] == [200, 200]


def test_client_that_leaves_the_queue_is_not_sent_to_a_worker(tmp_path: Path) -> None:
    with busy(tmp_path, "--router-queue-seconds", "0.25") as made:
        before = made.arrived()
        connection = httpx.Client(timeout=60)
        gone = made.threads.submit(connection.post, f"{made.stack.url}/v1/completions", json=_body(7, 200))
        stays = made.ask(5, 200)
        until("both to be held back", lambda: made.held() == 3)
        connection.close()
        assert gone.exception(60) is not None
        until("the client to be gone", lambda: made.held() == 2)
        made.leaves.set()
        assert stays.result(60).status_code == 200
        assert made.arrived() == before + 1
