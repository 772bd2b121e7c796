"""The request that proves a start, against a small stand-in for the frontend."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dynamo_vllm.errors import StartError
from dynamo_vllm.supervise.probe import Probe

ALONE = {"prefill_worker_id": 1, "decode_worker_id": 1}
OVER_TWO = {"prefill_worker_id": 2, "decode_worker_id": 1}


class Frontend:
    """Answers with these workers one after the other, the last one for good."""

    def __init__(self, *workers: dict[str, int]) -> None:
        self.workers = list(workers)
        self.asked: list[dict[str, Any]] = []
        frontend = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                frontend.asked.append(body)
                found = frontend.workers.pop(0) if len(frontend.workers) > 1 else frontend.workers[0]
                self._reply({"choices": [{}], "nvext": {"worker_id": found} if "nvext" in body else None})

            def _reply(self, answer: object) -> None:
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


async def ask(frontend: Frontend, split: set[str], seconds: float) -> None:
    thread = threading.Thread(target=frontend.server.serve_forever, args=(0.01,))
    thread.start()
    probe = Probe(answer_seconds=5)
    try:
        await probe.first_answer(frontend.url, ("m",), split, seconds)
    finally:
        await probe.close()
        frontend.server.shutdown()
        thread.join()
        frontend.server.server_close()


async def test_one_answer_is_enough_for_workers_that_do_all() -> None:
    frontend = Frontend({})
    await ask(frontend, set(), 5)
    assert frontend.asked == [{"model": "m", "prompt": "Hello", "max_tokens": 1}]


async def test_start_is_proven_when_a_prefill_worker_took_part() -> None:
    """The frontend may know the decode worker a moment earlier."""
    frontend = Frontend({"decode_worker_id": 1}, ALONE, OVER_TWO)
    await ask(frontend, {"m"}, 10)
    assert len(frontend.asked) == 3


async def test_prefill_workers_nobody_uses_fail_the_start() -> None:
    with pytest.raises(StartError, match="the first request to m failed: .* without a prefill worker"):
        await ask(Frontend(ALONE), {"m"}, 0.5)
