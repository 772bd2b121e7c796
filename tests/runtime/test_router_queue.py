"""What becomes of others while one request, whose first token does not come, keeps a worker busy."""

from __future__ import annotations

import json
import socket
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
IN_FLIGHT = "dynamo_component_requests_in_flight"
# What this engine is said to compute in a quarter of a second is a quarter of its context.
SPEC = {"vocab_size": 1000, "stall_on_token": STALLS, "context_length": 256}


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


@contextmanager
def busy(folder: Path, *flags: str) -> Iterator[Busy]:
    model = make_tiny_model(folder / "tiny")
    with stack(folder) as made, ThreadPoolExecutor() as threads:
        made.start_frontend(*flags)
        fake = ("--engine", "fake", "--fake-engine", json.dumps(SPEC))
        worker = made.start_worker("--model", str(model), "--served-model-name", "tiny", *fake)
        made.wait_ready()
        with _send(made, STALLS, 200) as hangs:
            until("the request that hangs", lambda: worker.metric(IN_FLIGHT) == 1)
            yield Busy(made, hangs, threads)


def test_others_do_not_wait_for_long_for_a_request_that_hangs(tmp_path: Path) -> None:
    """The worker reports it, so that one request cannot keep a worker from all others."""
    with busy(tmp_path, "--router-queue-seconds", "0.25") as made:
        before, others = made.arrived(), [made.ask(5, 200), made.ask(6, 10)]
        until("one to wait", lambda: made.waiting() > 1 and made.arrived() == before)
        assert [other.result(60).status_code for other in others] == [200, 200]


def test_queue_holds_requests_back_until_the_worker_can_take_them(tmp_path: Path) -> None:
    with busy(tmp_path, "--router-queue-seconds", "0.25") as made:
        before = made.arrived()
        long, short = made.ask(5, 200), made.ask(6, 10)
        until("both to wait", lambda: made.waiting() == 3)
        assert (long.done(), short.done(), made.arrived()) == (False, False, before)
        made.hangs.close()
        assert [answer.result(60).status_code for answer in (long, short)] == [200, 200]


def test_client_that_leaves_the_queue_is_not_sent_to_a_worker(tmp_path: Path) -> None:
    with busy(tmp_path, "--router-queue-seconds", "0.25") as made:
        before = made.arrived()
        with _send(made.stack, 7, 200):
            stays = made.ask(5, 200)
            until("both to wait", lambda: made.waiting() == 3)
        until("the client to be gone", lambda: made.waiting() == 2)
        made.hangs.close()
        assert stays.result(60).status_code == 200
        assert made.arrived() == before + 1
