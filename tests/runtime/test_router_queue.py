"""What becomes of others while one request, whose first token does not come, keeps a worker busy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from harness import metrics
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake

STALLS = 99
IN_FLIGHT = "dynamo_component_requests_in_flight"


@dataclass
class Busy:
    """A deployment of one worker, with one request that hangs in its engine until its client leaves."""

    stack: Stack
    hangs: socket.socket
    threads: ThreadPoolExecutor

    def ask(self, token: int, tokens: int) -> Future[httpx.Response]:
        return self.threads.submit(self.stack.post, "/v1/completions", _body(token, tokens))

    def waiting(self) -> int:
        """Requests that wait for a first token, at the frontend or further on."""
        text = httpx.get(f"{self.stack.url}/metrics", timeout=30).text
        return int(metrics.total(text, "dynamo_frontend_queued_requests"))

    def arrived(self) -> int:
        """Requests that the worker has got."""
        return int(self.stack.workers[0].metric("dynamo_component_requests_total"))


def _body(token: int, tokens: int) -> dict[str, object]:
    return {"model": "tiny", "prompt": [token] * tokens, "max_tokens": 2}


def _send(stack: Stack, token: int, tokens: int) -> socket.socket:
    """Ask without reading the answer; closing the connection leaves."""
    content = json.dumps(_body(token, tokens)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    made = socket.create_connection((stack.address, stack.port), 60)
    made.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
    return made


# What this engine is said to compute in a quarter of a second is a quarter of its context.
@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("queue")) as made:
        made.start_frontend("--router-queue-seconds", "0.25")
        made.start_worker(*fake(model, stall_on_token=STALLS, context_length=256))
        yield made.wait_ready()


@pytest.fixture
def busy(running: Stack) -> Iterator[Busy]:
    (worker,) = running.workers
    until("an end of earlier requests", lambda: worker.metric(IN_FLIGHT) == 0)
    with ThreadPoolExecutor() as threads, _send(running, STALLS, 200) as hangs:
        until("the request that hangs", lambda: worker.metric(IN_FLIGHT) == 1)
        yield Busy(running, hangs, threads)


def test_others_do_not_wait_for_long_for_a_request_that_hangs(busy: Busy) -> None:
    """The worker reports it, so that one request cannot keep a worker from all others."""
    before, others = busy.arrived(), [busy.ask(5, 200), busy.ask(6, 10)]
    until("one to wait", lambda: busy.waiting() > 1 and busy.arrived() == before)
    assert [other.result(60).status_code for other in others] == [200, 200]


def test_queue_holds_requests_back_until_the_worker_can_take_them(busy: Busy) -> None:
    """A client that leaves it is not sent to a worker."""
    before = busy.arrived()
    with _send(busy.stack, 7, 200):
        long, short = busy.ask(5, 200), busy.ask(6, 10)
        until("all to wait", lambda: busy.waiting() == 4)
    until("the client to be gone", lambda: busy.waiting() == 3)
    assert (long.done(), short.done(), busy.arrived()) == (False, False, before)
    busy.hangs.close()
    assert [answer.result(60).status_code for answer in (long, short)] == [200, 200]
    assert busy.arrived() == before + 2
