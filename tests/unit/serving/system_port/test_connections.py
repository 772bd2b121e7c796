"""The system port while somebody uses up its connections, or the process its descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from dynamo_vllm.serving.system_port import handler
from dynamo_vllm.serving.system_port.handler import SystemPort
from harness.waiting import until

LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Behind(BaseHTTPRequestHandler):
    """Stands for the runtime's server; at /metrics it waits until it may answer."""

    protocol_version = "HTTP/1.1"
    may_answer = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.may_answer.wait(60)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SystemPort]:
    monkeypatch.setattr(handler, "STOP_SECONDS", 0.01)
    Behind.may_answer.clear()
    behind = Server(("127.0.0.1", 0), Behind)
    threading.Thread(target=behind.serve_forever, args=(0.01,), daemon=True).start()
    made = SystemPort("127.0.0.1", 0, ("127.0.0.1", behind.server_port))
    yield made
    Behind.may_answer.set()
    made.close()
    behind.shutdown()
    behind.server_close()


def answer(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"ok") and (more := connection.recv(1000)):
        found += more
    return found


@contextlib.contextmanager
def connected(
    port: int, count: int, sent: bytes = b"", source: str = "127.0.0.1"
) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(source, 0))
            made.append(stack.enter_context(connection))
            connection.sendall(sent)
        yield made


def live(port: int, path: str = "/live") -> int | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=30).status_code
    except httpx.HTTPError:
        return None


async def test_idle_connections_do_not_keep_a_probe_out(front: SystemPort) -> None:
    """Silent ones, and others in the middle of a request: more than it takes, less than the kernel queues."""
    with connected(front.port, 100), connected(front.port, 100, LIVE[:10]):
        answers = [await asyncio.to_thread(live, front.port) for _ in range(5)]
    assert answers == [200] * 5


async def test_oldest_idle_connection_goes_first(front: SystemPort) -> None:
    with connected(front.port, 70) as made:
        assert await asyncio.to_thread(live, front.port) == 200
        assert await asyncio.to_thread(made[0].recv, 1) == b""
        made[-1].sendall(LIVE)
        assert (await asyncio.to_thread(answer, made[-1])).startswith(b"HTTP/1.1 200 ")


async def test_connection_that_was_used_is_younger_than_a_silent_one(front: SystemPort) -> None:
    with connected(front.port, 2) as (used, silent):
        assert await asyncio.to_thread(live, front.port) == 200  # so that both before it are taken
        used.sendall(LIVE)
        assert (await asyncio.to_thread(answer, used)).startswith(b"HTTP/1.1 200 ")
        with connected(front.port, 63):
            assert await asyncio.to_thread(silent.recv, 1) == b""
            used.sendall(LIVE)
            assert (await asyncio.to_thread(answer, used)).startswith(b"HTTP/1.1 200 ")


async def test_probes_have_places_of_their_own_beside_busy_connections(front: SystemPort) -> None:
    asked = LIVE.replace(b"live", b"metrics")
    with (
        connected(front.port, 80, asked),
        connected(front.port, 80, asked, "127.0.0.2"),
        connected(front.port, 40, source="127.0.0.3"),
    ):
        answers = [await asyncio.to_thread(live, front.port) for _ in range(5)]
        assert answers == [200] * 5
        refused = await asyncio.to_thread(httpx.get, f"http://127.0.0.1:{front.port}/v1/loras")
        assert (refused.status_code, refused.json()["error"]) == (503, "busy")
    Behind.may_answer.set()
    await asyncio.to_thread(until, "places for all", lambda: live(front.port, "/metrics") == 200)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """All that this process may still open is taken."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_descriptors_it_waits_and_still_answers_probes(front: SystemPort) -> None:
    assert await asyncio.to_thread(live, front.port) == 200  # so that the way behind is open
    clients = [socket.socket() for _ in range(6)]
    try:
        with no_descriptors():
            used = time.process_time()
            began = time.monotonic()
            for client in clients[:5]:
                client.settimeout(60)
                client.connect(("127.0.0.1", front.port))
                client.sendall(LIVE)
                assert (await asyncio.to_thread(answer, client)).startswith(b"HTTP/1.1 200 ")
            clients[5].connect(("127.0.0.1", front.port))
            clients[5].settimeout(60)
            assert await asyncio.to_thread(clients[5].recv, 1) == b""  # it asked nothing
            busy = (time.process_time() - used) / (time.monotonic() - began)
        assert busy < 0.8
    finally:
        for client in clients:
            client.close()
    assert await asyncio.to_thread(live, front.port) == 200


async def test_path_with_other_characters_is_answered_and_one_of_nobody_is_not_found(
    front: SystemPort,
) -> None:
    def asked(path: str) -> bytes:
        with socket.create_connection(("127.0.0.1", front.port), timeout=60) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
            return b"".join(iter(lambda: connection.recv(65536), b""))

    for path in ("/caf\xe9", "/metrics?\xff", "/v1/metadata/\xe9", "/engine/\xe9", "http://[/live", "/\x01"):
        answered = await asyncio.to_thread(asked, path)
        assert answered.startswith(b"HTTP/1.1 400 ") and b"is not a path" in answered, path
    assert await asyncio.to_thread(live, front.port, "/busy") == 404
