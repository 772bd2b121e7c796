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


def get(
    front: SystemPort, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
    is_json = answer.getheader("Content-Type") == "application/json"
    return answer.status, json.loads(content) if is_json else content, dict(answer.getheaders())


async def ask(
    front: SystemPort, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    return await asyncio.to_thread(get, front, path, method, body, **headers)


async def test_everything_else_is_the_runtimes(behind: tuple[str, int]) -> None:
    with opened(behind) as front:
        status, content, headers = await ask(front, "GET", "/metrics?x=1")
        assert (status, content, headers["Content-Type"]) == (200, b"runtime /metrics?x=1", "text/x-runtime")
        assert (await ask(front, "GET", "/health"))[0] == 503


async def test_runtime_that_is_gone(behind: tuple[str, int]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with opened(("127.0.0.1", unused.getsockname()[1])) as front:
            assert (await ask(front, "GET", "/live"))[0] == 503


async def test_worker_that_was_told_to_rest_is_alive(behind: tuple[str, int]) -> None:
    """The runtime's /live says as little as /health; whoever watches would replace a worker that sleeps."""
    admin = Recorder()
    with opened(behind, admin) as front:
        assert (await ask(front, "GET", "/live"))[0] == 503
        admin.is_at_rest = True
        assert (await ask(front, "GET", "/live"))[:2] == (200, {"status": "resting"})
        assert (await ask(front, "GET", "/health"))[0] == 503


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
            status, reply, _ = get(front, "/live")
            if status == 503:
                return reply, get(front, "/health")[1]
        return None

    with opened(behind, admin) as front:
        front.watch_loop()
        assert (await ask(front, "GET", "/live"))[0] == 200
        with ThreadPoolExecutor(1) as pool:
            live, health = pool.submit(stuck).result()
        assert live["status"] == health["status"] == "stuck"
        assert live["message"].startswith("the worker's event loop has been blocked for")
        async with asyncio.timeout(10):
            while (await ask(front, "GET", "/live"))[0] != 200:
                await asyncio.sleep(0.01)


async def test_verbs_and_their_statuses(behind: tuple[str, int]) -> None:
    admin = Recorder()
    with opened(behind, admin) as front:
        assert (await ask(front, "POST", "/engine/sleep", b'{"level": 2}'))[0] == 200
        assert (await ask(front, "POST", "/engine/wake_up"))[0] == 200
        assert (await ask(front, "GET", "/v1/loras"))[0] == 200
        assert (await ask(front, "DELETE", "/v1/loras/team%2Fsql"))[0] == 200
        assert (await ask(front, "DELETE", "/v1/loras/team/sql"))[0] == 200
        status, reply, _ = await ask(front, "DELETE", "/v1/loras/none")
    assert (status, reply["error"]) == (404, "adapter_unknown")
    assert admin.asked == [
        ("sleep", {"level": 2}),
        ("wake_up", {}),
        ("list_loras", {}),
        ("unload_lora", {"lora_name": "team/sql"}),
        ("unload_lora", {"lora_name": "team/sql"}),
        ("unload_lora", {"lora_name": "none"}),
    ]


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


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/engine/sleep", None, 405, "/engine/sleep takes POST"),
        ("PUT", "/v1/loras", b"{}", 405, "takes GET or POST"),
        ("POST", "/engine/slep", b"{}", 404, "there is no /engine/slep"),
        ("POST", "/engine/sleep", b"{", 400, "the body is not JSON"),
        ("POST", "/engine/sleep", b'{"level": "\xed\xa0\x80"}', 400, "the body is not JSON"),
        ("POST", "/engine/sleep", b"[]", 400, "must be a JSON object"),
        ("POST", "/engine/sleep", b"x" * (system_port_handler.MAX_BODY_BYTES + 1), 413, "are allowed"),
    ],
)
async def test_bad_request(
    behind: tuple[str, int], method: str, path: str, body: bytes | None, status: int, said: str
) -> None:
    admin = Recorder()
    with opened(behind, admin) as front:
        found, reply, _ = await ask(front, method, path, body)
    assert (found, reply["status"]) == (status, "error") and said in reply["message"]
    assert admin.asked == []


async def test_what_nobody_thought_of_is_a_500_and_in_the_log(
    behind: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        async def perform(self, name: str, body: object) -> dict[str, Any]:
            raise ZeroDivisionError("of the inside")

    with opened(behind, Broken()) as front:
        status, reply, _ = await ask(front, "POST", "/engine/sleep")
    assert (status, reply["error"]) == (500, "failed") and "inside" not in str(reply)
    assert "ZeroDivisionError: of the inside" in caplog.text


async def test_verbs_wait_for_the_worker(behind: tuple[str, int]) -> None:
    with opened(behind) as front:
        status, reply, _ = await ask(front, "POST", "/engine/sleep")
    assert (status, reply["message"]) == (409, "this worker is still starting")


async def test_token(behind: tuple[str, int]) -> None:
    admin = Recorder("hush")
    with opened(behind, admin) as front:
        status, reply, headers = await ask(front, "POST", "/engine/sleep")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer") and "hush" not in str(reply)
        assert (await ask(front, "POST", "/engine/sleep", Authorization="Bearer no"))[0] == 401
        assert (await ask(front, "GET", "/v1/loras", Authorization="Basic hush"))[0] == 401
        assert (await ask(front, "GET", "/metrics"))[0] == 200
        assert (await ask(front, "POST", "/engine/sleep", Authorization="Bearer hush"))[0] == 200
    assert admin.asked == [("sleep", {})]


async def test_no_page_in_a_browser_may_ask(behind: tuple[str, int]) -> None:
    admin = Recorder()
    with opened(behind, admin) as front:
        assert (await ask(front, "POST", "/engine/sleep", Origin="http://evil.example"))[0] == 403
    assert admin.asked == []


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


@pytest.mark.parametrize("path", ["/metrics", "/engine/sleep", "/engine/none"])
async def test_page_cannot_hide_a_request_in_the_body_of_another(behind: tuple[str, int], path: str) -> None:
    """A browser sends any body anywhere, with its Origin on the outer request only."""
    admin = Recorder()
    outer = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
    with opened(behind, admin) as front:
        sized = f"{outer}Content-Length: {len(HIDDEN)}\r\n\r\n".encode()
        answers = await asyncio.to_thread(talk, front.port, sized + HIDDEN)
        assert answers.count(b"HTTP/1.1 ") == 1
        chunked = f"{outer}Transfer-Encoding: chunked\r\n\r\n".encode()
        answers = await asyncio.to_thread(talk, front.port, chunked + HIDDEN)
        assert answers.count(b"HTTP/1.1 ") == 1
    assert admin.asked == []


@pytest.mark.parametrize(
    "lengths",
    [("100",), ("2", "3"), ("-1",), ("+2",), ("1_0",), ("9" * 5000,)],
    ids=["broken off", "two", "negative", "signed", "underscore", "more digits than Python reads"],
)
async def test_body_of_doubtful_length_does_nothing(
    behind: tuple[str, int], lengths: tuple[str, ...]
) -> None:
    admin = Recorder()
    head = "POST /engine/sleep HTTP/1.1\r\nHost: localhost\r\n"
    head += "".join(f"Content-Length: {length}\r\n" for length in lengths)
    with opened(behind, admin) as front:
        answer = await asyncio.to_thread(talk, front.port, f"{head}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert admin.asked == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"BREW /engine/sleep HTTP/1.1\r\n\r\n", 501),
        (b"GET /live HTTP/9.9\r\n\r\n", 505),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"\x16\x03\x01 \x00\x01\r\n\r\n", 400),
    ],
    ids=["method", "version", "path", "headers", "TLS"],
)
async def test_what_is_no_request_is_refused_in_the_same_form(
    behind: tuple[str, int], sent: bytes, status: int
) -> None:
    with opened(behind, Recorder()) as front:
        head, _, body = (await asyncio.to_thread(talk, front.port, sent)).partition(b"\r\n\r\n")
    reply = json.loads(body or head)
    assert (reply["status"], reply["error"], reply["code"]) == ("error", "bad_command", status)
    assert not body or f" {status} ".encode() in head.splitlines()[0]


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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:9090"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "["}, 403),
        ({"X-Forwarded-For": "10.0.0.9"}, 403),
        ({"Forwarded": "for=10.0.0.9"}, 403),
        ({"Via": "1.1 proxy"}, 403),
        ({"Host": "localhost:9090"}, 200),
        ({"Host": "[::1]:9090"}, 200),
        ({"Host": "10.0.0.1"}, 200),
        ({"Host": socket.gethostname()}, 200),
    ],
)
async def test_only_programs_that_speak_to_this_machine_itself(
    behind: tuple[str, int], headers: dict[str, Any], status: int
) -> None:
    """A page's own name may lead here (DNS rebinding), and a proxy's clients may be anywhere."""
    admin = Recorder()
    with opened(behind, admin) as front:
        assert (await ask(front, "GET", "/v1/loras", **headers))[0] == status
        assert (await ask(front, "GET", "/metrics", **headers))[0] == 200
        admin.token = "hush"
        with_token = await ask(front, "GET", "/v1/loras", **headers, Authorization="Bearer hush")
        assert with_token[0] == 200


async def test_numbers_that_are_none_are_no_json(behind: tuple[str, int]) -> None:
    admin = Recorder()
    with opened(behind, admin) as front:
        for number in (b"NaN", b"Infinity", b"1e999"):
            status, reply, _ = await ask(front, "POST", "/engine/sleep", b'{"drain_seconds": %s}' % number)
            assert (status, "not JSON" in reply["message"]) == (400, True)
        assert (await ask(front, "POST", "/engine/sleep", b"[" * 100_000))[0] == 400
    assert admin.asked == []


async def test_client_that_dawdles_does_not_keep_its_connection(
    behind: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_port_handler, "HEADER_SECONDS", 0.3)

    def dawdle(port: int) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nX: ")
            for sent in range(600):
                time.sleep(0.05)
                try:
                    connection.sendall(b"x")
                except OSError:
                    return sent
        return 600

    with opened(behind, Recorder()) as front:
        assert await asyncio.to_thread(dawdle, front.port) < 600


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
        assert (await ask(front, "GET", "/metrics"))[0] == 200


async def test_other_machines_need_a_token(behind: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "is_loopback", lambda address: False)
    admin = Recorder()
    with opened(behind, admin) as front:
        status, reply, _ = await ask(front, "POST", "/engine/sleep")
        assert status == 403 and "--admin-token" in reply["message"]
        assert (await ask(front, "GET", "/metrics"))[0] == 200
        admin.token = "hush"
        assert (await ask(front, "POST", "/engine/sleep", Authorization="Bearer hush"))[0] == 200


async def test_taken_port_is_named(behind: tuple[str, int]) -> None:
    with pytest.raises(StartError, match=f"--system-port {behind[1]} on 127.0.0.1 cannot be used"):
        SystemPort("127.0.0.1", behind[1], behind)


@pytest.mark.parametrize(
    ("address", "is_ours"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("::ffff:127.0.0.1", True)]
    + [("10.0.0.1", False), ("fe80::1%eth0", False), ("::ffff:10.0.0.1", False), ("2001:db8::1", False)],
)
def test_loopback(address: str, is_ours: bool) -> None:
    assert is_loopback(address) is is_ours


def test_every_verb_has_a_route() -> None:
    assert {route("POST", f"/engine/{name}")[0] for name in VERBS} == set(VERBS)
