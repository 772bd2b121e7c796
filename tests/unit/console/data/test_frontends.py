"""Frontends, asked over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from dynamo_vllm.console.data.frontends import Frontends

PAGES = {
    "/health": (200, json.dumps({"status": "ready", "models": ["tiny"]})),
    "/metrics": (200, 'dynamo_frontend_inflight_requests{model="tiny"} 2\n'),
    "/v1/models": (200, json.dumps({"data": [{"id": "tiny"}, "odd", {"no": "id"}]})),
}


class Server:
    """A frontend with these pages."""

    def __init__(self) -> None:
        self.pages = dict(PAGES)
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout: ClassVar[float] = 30

            def do_GET(self) -> None:
                status, text = served.pages.get(self.path, (404, ""))
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


async def test_frontend_says_what_can_answer_and_how_busy_it_is(server: Server) -> None:
    asked = Frontends([server.url], server.url)
    (one,) = await asked.ask()
    assert (one.name, one.models, one.is_ready, one.figures.in_flight) == ("frontend", ("tiny",), True, 2.0)
    assert await asked.models() == [{"id": "tiny"}]
    await asked.close()


async def test_frontend_that_is_gone_is_one_problem_of_several(server: Server) -> None:
    gone = Server()
    gone.close()
    asked = Frontends([gone.url, server.url], server.url)
    first, second = await asked.ask()
    assert (first.name, second.name) == ("frontend", "frontend-2")
    assert first.problem and not first.is_ready
    assert second.problem is None
    assert await asked.models() == [{"id": "tiny"}]
    await asked.close()


@pytest.mark.parametrize(
    ("health", "is_ready"),
    [
        ((503, json.dumps({"status": "not ready", "models": []})), False),
        ((200, "OK"), True),
        ((200, json.dumps({"status": "healthy"})), True),
        ((503, "<html>"), False),
    ],
)
async def test_health_of_other_frontends_is_understood(
    server: Server, health: tuple[int, str], is_ready: bool
) -> None:
    server.pages["/health"] = health
    asked = Frontends([server.url], server.url)
    (one,) = await asked.ask()
    assert one.is_ready is is_ready and one.problem is None
    await asked.close()


async def test_pages_that_are_missing_or_odd_have_nothing(server: Server) -> None:
    server.pages = {"/health": PAGES["/health"], "/v1/models": (200, "[")}
    asked = Frontends([server.url], server.url)
    (one,) = await asked.ask()
    assert one.figures.in_flight == 0.0
    assert await asked.models() == []
    await asked.close()
