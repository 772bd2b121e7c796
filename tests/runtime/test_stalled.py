"""Clients that stop reading, through the real frontend and runtime."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from dynamo_vllm.serving.request.egress import CHUNKS
from harness.stack import TESTS, Stack, environment
from harness.waiting import until
from runtime.conftest import StartFake

OTHER = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 200}


@contextlib.contextmanager
def stalled(deployment: Stack, **more: object) -> Iterator[None]:
    """A client that asks for a long answer and does not read it."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 500_000,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        **more,
    }
    content = json.dumps(body).encode()
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect((deployment.address, deployment.port))
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + content)
        assert b" 200 " in client.recv(100)
        yield


def test_client_that_does_not_read_is_left_and_nobody_waits_for_it(
    deployment: Stack, start_fake: StartFake
) -> None:
    worker = start_fake("--unread-mb", "1", context_length=1 << 20)
    deployment.wait_ready()
    with stalled(deployment), stalled(deployment), stalled(deployment, n=2):

        def are_ended() -> bool:
            assert deployment.post("/v1/completions", OTHER).status_code == 200
            return worker.metric("dynamo_component_answers_unread_total") == 3

        until("the end of their requests", are_ended, 200)
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0
    assert worker.log.read_text().count("refused: the client leaves more than 1000000 bytes unread") == 3


def test_worker_drains_while_clients_do_not_read(deployment: Stack, start_fake: StartFake) -> None:
    """Their answers are not long enough to be ended, and cannot be sent."""
    worker = start_fake("--unread-mb", "1000", "--drain-seconds", "3", context_length=1 << 20)
    deployment.wait_ready()
    process = psutil.Process(worker.pid)
    before = process.num_threads()
    with stalled(deployment), stalled(deployment):
        until(
            "a thread for each of them, and one for the rest",
            lambda: process.num_threads() >= before + 3,
            200,
        )
        assert deployment.post("/v1/completions", OTHER).status_code == 200
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(90) == 0


def test_runtime_has_places_for_what_is_sent_between_two_looks(tmp_path: Path) -> None:
    """A look that another stream took may be as many chunks old as are sent after it."""
    command = [sys.executable, "-m", "harness.places", str(2 * CHUNKS)]
    env = environment(tmp_path, DYN_LOG="off", PYTHONPATH=str(TESTS))
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=200)
    assert int(done.stdout) >= 2 * CHUNKS, done.stderr[-2000:]
