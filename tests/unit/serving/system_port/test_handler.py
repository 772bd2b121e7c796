"""The system port over a real server behind it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.errors import StartError
from dynamo_vllm.serving.lifecycle import loop_heartbeat
from dynamo_vllm.serving.system_port import callers, connections
from dynamo_vllm.serving.system_port import handler as system_port_handler
from dynamo_vllm.serving.system_port.callers import is_loopback
from dynamo_vllm.serving.system_port.handler import SystemPort
from dynamo_vllm.serving.system_port.routes import route


class Behind(BaseHTTPRequestHandler):
    """Stands for the runtime's server."""

    def do_GET(self) -> None:
        content = f"runtime {self.path}".encode()
        self.send_response(503 if self.path in ("/health", "/live") else 200)
        self.send_header("Content-Type", "text/x-runtime")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


class Recorder:
    """Performs nothing and says what it was asked."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.is_at_rest = False
        self.asked: list[tuple[str, object]] = []

    @property
    def has_token(self) -> bool:
        return self.token is not None

    def is_token(self, given: str | None) -> bool:
        return given == self.token

    async def perform(self, name: str, body: object) -> dict[str, Any]:
        self.asked.append((name, body))
        if body == {"lora_name": "none"}:
            return {"status": "error", "error": "adapter_unknown", "message": "no", "code": 404}
        return {"status": "success"}


@pytest.fixture(autouse=True)
def ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_port_handler, "STOP_SECONDS", 0.01)


@pytest.fixture(scope="module")
def behind() -> Iterator[tuple[str, int]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Behind)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield "127.0.0.1", server.server_port
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def opened(behind: tuple[str, int], admin: Recorder | None = None) -> Iterator[SystemPort]:
    front = SystemPort("127.0.0.1", 0, behind)
    front.admin = admin  # type: ignore[assignment]
    try:
        yield front
    finally:
        front.close()


Answer = tuple[int, Any, dict[str, str]]


def get(
    front: SystemPort, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
    is_json = answer.getheader("Content-Type") == "application/json"
    return answer.status, json.loads(content) if is_json else content, dict(answer.getheaders())


async def ask(front: SystemPort, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    return await asyncio.to_thread(get, front, path, method, body, **headers)


async def status(front: SystemPort, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    return (await ask(front, method, path, body, **headers))[0]


async def test_everything_else_is_the_runtimes(behind: tuple[str, int]) -> None:
    with opened(behind) as front:
        code, content, headers = await ask(front, "GET", "/metrics?x=1")
        assert (code, content, headers["Content-Type"]) == (200, b"runtime /metrics?x=1", "text/x-runtime")
        assert await status(front, "GET", "/health") == 503


async def test_runtime_that_is_gone() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with opened(("127.0.0.1", unused.getsockname()[1])) as front:
            assert await status(front, "GET", "/live") == 503


async def test_worker_that_was_told_to_rest_is_alive(behind: tuple[str, int]) -> None:
    """The runtime's /live says as little as /health; whoever watches would replace a worker that sleeps."""
    admin = Recorder()
    with opened(behind, admin) as front:
        assert await status(front, "GET", "/live") == 503
        admin.is_at_rest = True
        assert (await ask(front, "GET", "/live"))[:2] == (200, {"status": "resting"})
        assert await status(front, "GET", "/health") == 503


async def test_loop_that_stands_still_is_told_until_it_goes_on(
    behind: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_heartbeat, "BEAT_SECONDS", 0.01)
    admin = Recorder()
    admin.is_at_rest = True

    def stuck() -> Any:
        """With this the loop stands still: it waits for it."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            code, reply, _ = get(front, "/live")
            if code == 503:
                return reply, get(front, "/health")[1]
        return None

    with opened(behind, admin) as front:
        front.watch_loop()
        assert await status(front, "GET", "/live") == 200
        with ThreadPoolExecutor(1) as pool:
            live, health = pool.submit(stuck).result()
        assert live["status"] == health["status"] == "stuck"
        assert live["message"].startswith("the worker's event loop has been blocked for")
        async with asyncio.timeout(10):
            while await status(front, "GET", "/live") != 200:
                await asyncio.sleep(0.01)


async def test_verbs_and_their_statuses(behind: tuple[str, int]) -> None:
    admin = Recorder()
    calls: list[tuple[str, str, bytes | None, str, dict[str, Any]]] = [
        ("POST", "/engine/sleep", b'{"level": 2}', "sleep", {"level": 2}),
        ("POST", "/engine/wake_up", None, "wake_up", {}),
        ("GET", "/v1/loras", None, "list_loras", {}),
        ("DELETE", "/v1/loras/team%2Fsql", None, "unload_lora", {"lora_name": "team/sql"}),
        ("DELETE", "/v1/loras/team/sql", None, "unload_lora", {"lora_name": "team/sql"}),
    ]
    with opened(behind) as front:
        code, reply, _ = await ask(front, "POST", "/engine/sleep")
        assert (code, reply["message"]) == (409, "this worker is still starting")
    with opened(behind, admin) as front:
        for method, path, body, *_ in calls:
            assert await status(front, method, path, body) == 200
        assert admin.asked == [(verb, body) for *_, verb, body in calls]
        code, reply, _ = await ask(front, "DELETE", "/v1/loras/none")
    assert (code, reply["error"]) == (404, "adapter_unknown")


async def test_one_connection_for_several_requests(behind: tuple[str, int]) -> None:
    def talk(port: int) -> list[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        found = []
        with contextlib.closing(connection):
            for method, path in (("GET", "/metrics"), ("POST", "/engine/sleep"), ("GET", "/live")):
                connection.request(method, path)
                found.append(connection.getresponse().read())
        return found

    with opened(behind, Recorder()) as front:
        found = await asyncio.to_thread(talk, front.port)
    assert found == [b"runtime /metrics", b'{"status": "success"}', b"runtime /live"]


async def test_bad_request(behind: tuple[str, int]) -> None:
    admin = Recorder()
    no_json = [
        b"{",
        b'{"level": "\xed\xa0\x80"}',
        *(b'{"drain_seconds": %s}' % n for n in (b"NaN", b"Infinity", b"1e999")),
    ]
    requests: list[tuple[str, str, bytes | None, int, str]] = [
        ("GET", "/engine/sleep", None, 405, "/engine/sleep takes POST"),
        ("PUT", "/v1/loras", b"{}", 405, "takes GET or POST"),
        ("POST", "/engine/slep", b"{}", 404, "there is no /engine/slep"),
        *(("POST", "/engine/sleep", body, 400, "the body is not JSON") for body in no_json),
        ("POST", "/engine/sleep", b"[" * 100_000, 400, ""),
        ("POST", "/engine/sleep", b"[]", 400, "must be a JSON object"),
        ("POST", "/engine/sleep", b"x" * (system_port_handler.MAX_BODY_BYTES + 1), 413, "are allowed"),
    ]
    with opened(behind, admin) as front:
        for method, path, body, code, message in requests:
            answered, reply, _ = await ask(front, method, path, body)
            assert (answered, reply["status"]) == (code, "error") and message in reply["message"]
    assert admin.asked == []


async def test_what_nobody_thought_of_is_a_500_and_in_the_log(
    behind: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        async def perform(self, name: str, body: object) -> dict[str, Any]:
            raise ZeroDivisionError("of the inside")

    with opened(behind, Broken()) as front:
        code, reply, _ = await ask(front, "POST", "/engine/sleep")
    assert (code, reply["error"]) == (500, "failed") and "inside" not in str(reply)
    assert "ZeroDivisionError: of the inside" in caplog.text


async def test_token_or_a_program_of_this_machine_is_needed(
    behind: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Recorder("hush")
    with opened(behind, admin) as front:
        code, reply, headers = await ask(front, "POST", "/engine/sleep")
        assert (code, headers["WWW-Authenticate"]) == (401, "Bearer") and "hush" not in str(reply)
        assert await status(front, "POST", "/engine/sleep", Authorization="Bearer no") == 401
        assert await status(front, "GET", "/v1/loras", Authorization="Basic hush") == 401
        assert await status(front, "GET", "/metrics") == 200
        admin.token = None
        assert await status(front, "POST", "/engine/sleep", Origin="http://evil.example") == 403
        monkeypatch.setattr(callers, "is_loopback", lambda address: False)
        code, reply, _ = await ask(front, "POST", "/engine/sleep")
        assert code == 403 and "--admin-token" in reply["message"]
        assert await status(front, "GET", "/metrics") == 200
        assert admin.asked == []
        admin.token = "hush"
        assert await status(front, "POST", "/engine/sleep", Authorization="Bearer hush") == 200
    assert admin.asked == [("sleep", {})]


def talk(port: int, *sent: bytes) -> bytes:
    """All that comes back for bytes as they are."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for part in sent:
            connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while more := connection.recv(65536):
            found += more
    return found


HIDDEN = b"POST /engine/sleep HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


async def test_page_cannot_hide_a_request_in_the_body_of_another(behind: tuple[str, int]) -> None:
    """A browser sends any body anywhere, with its Origin on the outer request only."""
    admin = Recorder()
    with opened(behind, admin) as front:
        for path in ("/metrics", "/engine/sleep", "/engine/none"):
            for length in (f"Content-Length: {len(HIDDEN)}", "Transfer-Encoding: chunked"):
                outer = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n{length}\r\n\r\n"
                answers = await asyncio.to_thread(talk, front.port, outer.encode() + HIDDEN)
                assert answers.count(b"HTTP/1.1 ") == 1
    assert admin.asked == []


async def test_body_of_doubtful_length_does_nothing(behind: tuple[str, int]) -> None:
    """Broken off, two, negative, signed, with an underscore, with more digits than Python reads."""
    admin = Recorder()
    with opened(behind, admin) as front:
        for lengths in (("100",), ("2", "3"), ("-1",), ("+2",), ("1_0",), ("9" * 5000,)):
            head = "POST /engine/sleep HTTP/1.1\r\nHost: localhost\r\n"
            head += "".join(f"Content-Length: {length}\r\n" for length in lengths)
            answer = await asyncio.to_thread(talk, front.port, f"{head}\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 400 "), lengths
    assert admin.asked == []


async def test_what_is_no_request_is_refused_in_the_same_form(behind: tuple[str, int]) -> None:
    bad = {
        b"BREW /engine/sleep HTTP/1.1\r\n\r\n": 501,
        b"GET /live HTTP/9.9\r\n\r\n": 505,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n": 414,
        b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n": 431,
        b"\x16\x03\x01 \x00\x01\r\n\r\n": 400,  # TLS
    }
    with opened(behind, Recorder()) as front:
        for sent, code in bad.items():
            head, _, body = (await asyncio.to_thread(talk, front.port, sent)).partition(b"\r\n\r\n")
            reply = json.loads(body or head)
            assert (reply["status"], reply["error"], reply["code"]) == ("error", "bad_command", code)
            assert not body or f" {code} ".encode() in head.splitlines()[0]


async def test_request_begun_before_the_worker_was_ready_needs_the_token_too(behind: tuple[str, int]) -> None:
    admin = Recorder("hush")
    with opened(behind) as front, socket.create_connection(("127.0.0.1", front.port), timeout=30) as early:
        early.sendall(b"POST /engine/sleep HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        await ask(front, "GET", "/live")
        front.admin = admin  # type: ignore[assignment]
        early.sendall(b"{}")
        answer = await asyncio.to_thread(early.recv, 100)
    assert answer.startswith((b"HTTP/1.1 409 ", b"HTTP/1.1 401 "))
    assert admin.asked == []


async def test_only_programs_that_speak_to_this_machine_itself(behind: tuple[str, int]) -> None:
    """A page's own name may lead here (DNS rebinding), and a proxy's clients may be anywhere."""
    admin = Recorder()
    foreign: list[dict[str, Any]] = [
        {"Host": host} for host in ("evil.example:9090", "127.0.0.1.evil.example", "[")
    ]
    foreign += [{"X-Forwarded-For": "10.0.0.9"}, {"Forwarded": "for=10.0.0.9"}, {"Via": "1.1 proxy"}]
    ours: list[dict[str, Any]] = [
        {"Host": host} for host in ("localhost:9090", "[::1]:9090", "10.0.0.1", socket.gethostname())
    ]
    with opened(behind, admin) as front:
        for headers in foreign + ours:
            admin.token = None
            assert await status(front, "GET", "/v1/loras", **headers) == (200 if headers in ours else 403)
            assert await status(front, "GET", "/metrics", **headers) == 200
            admin.token = "hush"
            assert await status(front, "GET", "/v1/loras", **headers, Authorization="Bearer hush") == 200


async def test_client_that_dawdles_does_not_keep_its_connection(
    behind: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_port_handler, "HEADER_SECONDS", 0.1)

    def dawdle(port: int) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nX: ")
            for sent in range(3000):
                time.sleep(0.01)
                try:
                    connection.sendall(b"x")
                except OSError:
                    return sent
        return 3000

    with opened(behind, Recorder()) as front:
        assert await asyncio.to_thread(dawdle, front.port) < 3000


async def test_connections_without_a_thread_do_not_use_the_places_up(
    behind: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if "process_request_thread" in thread.name:  # the asking here needs threads too
            raise RuntimeError("can't start new thread")
        start(thread)

    with opened(behind) as front:
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", no_thread)
            for _ in range(3):
                with pytest.raises(OSError):  # closed, or reset
                    await ask(front, "GET", "/metrics")
        assert await status(front, "GET", "/metrics") == 200


async def test_taken_port_is_named(behind: tuple[str, int]) -> None:
    with pytest.raises(StartError, match=f"--system-port {behind[1]} on 127.0.0.1 cannot be used"):
        SystemPort("127.0.0.1", behind[1], behind)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1", "2001:db8::1")))


def test_every_verb_has_a_route() -> None:
    assert {route("POST", f"/engine/{name}")[0] for name in VERBS} == set(VERBS)
