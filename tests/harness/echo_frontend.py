"""A stand-in for a frontend that answers with what it got: its path, its headers, the size of its body."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

from harness.live import Quiet

SLOTS = 100
METRICS = f"""\
dynamo_frontend_model_max_num_seqs{{model="m"}} {SLOTS}
dynamo_frontend_worker_active_decode_blocks{{dp_rank="0",worker_id="1",worker_type="decode"}} 0
"""
MISSING = "missing"
"""A model that nobody has."""
HOLD = "hold"
"""A model with this name is answered when the server is told to."""


class EchoFrontend(Quiet):
    daemon_threads = True

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.held = threading.Semaphore(0)
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: EchoFrontend

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("content-length", 0))))

    def _answer(self, body: bytes) -> None:
        status = 200
        with contextlib.suppress(ValueError, AttributeError):
            model = json.loads(body or b"{}").get("model")
            status = 404 if model == MISSING else 200
            if model == HOLD:
                self.server.held.release()
                self.server.may_answer.wait(60)
        if self.path == "/metrics":
            self._send("text/plain", METRICS.encode())
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        said = json.dumps({"path": self.path, "headers": headers, "bytes": len(body)}).encode()
        self._send("application/json", said, status)

    def _send(self, kind: str, said: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def echoing() -> Iterator[EchoFrontend]:
    with EchoFrontend() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.may_answer.set()
            server.shutdown()
            thread.join()
