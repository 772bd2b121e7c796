"""Our server on the system port: admin verbs here, everything else from the runtime's server behind it.

The runtime's own server knows two statuses for a verb, shows callers the text of exceptions and sees neither
their address nor their headers. Threads, because /live must be answered while the engine starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from dynamo_vllm.admin.verbs import failure
from dynamo_vllm.errors import AdminError, BadCommand, StartError, WrongState
from dynamo_vllm.serving import system_callers
from dynamo_vllm.serving.loop_pulse import LoopPulse
from dynamo_vllm.serving.system_routes import route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_vllm.admin.base import Reply
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.serving.admin import Admin

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
MAX_CONNECTIONS = 128
REQUEST_SECONDS = 30.0
"""For all of a request, the pause before it too: a client that dawdles must not keep others from /live."""
SEND_SECONDS = 30.0
BEHIND_SECONDS = 30.0
STOP_SECONDS = 0.1
_ADMIN = ("/engine/", "/v1/loras")
_PER_CONNECTION = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "host",
    "date",
    "server",
}


class SystemPort:
    """Listens from the start; verbs are answered once `admin` is set."""

    def __init__(self, host: str, port: int, behind: tuple[str, int]) -> None:
        self.admin: Admin | None = None
        self.behind = behind
        self.loop = asyncio.get_running_loop()
        self.pulse: LoopPulse | None = None
        try:
            self._server = _Server((host, port), self)
        except OSError as exc:
            raise StartError(
                f"--system-port {port} on {host} cannot be used: {exc.strerror}; choose another"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_SECONDS,), name="system-port", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def watch_loop(self) -> None:
        """From now on /live depends on the worker's loop, which a starting engine holds up for minutes."""
        self.pulse = LoopPulse(self.loop)

    def close(self) -> None:
        if self.pulse is not None:
            self.pulse.stop()
        self._server.shutdown()
        self._server.server_close()

    def perform(self, admin: Admin, name: str, body: object) -> Reply:
        """From a connection's thread: done on the worker's loop."""
        return asyncio.run_coroutine_threadsafe(admin.perform(name, body), self.loop).result()


@contextlib.contextmanager
def opened(options: WorkerOptions, runtime_port: int | None) -> Iterator[SystemPort | None]:
    """None where the worker has no system port."""
    if options.system_port is None or runtime_port is None:
        yield None
        return
    host = options.system_host or options.bind_host or "0.0.0.0"
    behind = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    front = SystemPort(host, options.system_port, (behind, runtime_port))
    try:
        yield front
    finally:
        front.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], owner: SystemPort) -> None:
        self.owner = owner
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the name lookup of the standard one."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # a limit on threads: none was started that would give the place back
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection to the system port broke off", exc_info=True)


class _Reader(io.RawIOBase):
    """What a client sends, until `deadline`; a timeout of the socket would begin anew with every byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dynamo-vllm", ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reader = _Reader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.deadline = time.monotonic() + REQUEST_SECONDS
        super().handle_one_request()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        admin, pulse = self.server.owner.admin, self.server.owner.pulse
        stuck_seconds = pulse.stuck_seconds if pulse is not None else None
        if path in ("/live", "/health") and stuck_seconds is not None:
            message = f"the worker's event loop has stood still for {stuck_seconds:.0f} s"
            self._send_json(503, {"status": "stuck", "message": message})
        elif path.startswith(_ADMIN):
            reply = self._verb(path)
            self._send_json(int(reply.get("code", 200)), reply)
        elif path == "/live" and admin is not None and admin.rests:
            # The runtime says here what it says at /health, and whoever watches would replace the worker.
            self._send_json(200, {"status": "resting"})
        else:
            self._forward()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _answer

    def _verb(self, path: str) -> Reply:
        try:
            admin = self.server.owner.admin
            if admin is None:
                raise WrongState("this worker is still starting")
            system_callers.check(admin, self.client_address[0], self.headers)
            verb, fields = route(self.command, path)
            return self.server.owner.perform(admin, verb, self._body() | fields)
        except AdminError as exc:
            # What is left of the body would be read as the next request.
            self.close_connection = True
            return failure(exc)

    def _body(self) -> dict[str, Any]:
        if "Transfer-Encoding" in self.headers:
            raise BadCommand("send the body with a Content-Length")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) > 1 or not lengths[0].isdecimal():
            raise BadCommand(f"Content-Length is {', '.join(lengths)[:80]!r}; send one number")
        length = int(lengths[0])
        if length > MAX_BODY_BYTES:
            self.rfile.read(min(length, 2 * MAX_BODY_BYTES))  # a client reads no answer before it wrote
            raise TooLarge(f"the body has {length} bytes; {MAX_BODY_BYTES} are the most")
        raw = self.rfile.read(length)
        if len(raw) < length:
            raise BadCommand(f"the body broke off after {len(raw)} of {length} bytes")
        try:
            body = msgspec.json.decode(raw) if raw.strip() else {}
        except (msgspec.DecodeError, RecursionError) as exc:
            raise BadCommand(f"the body is no JSON: {exc}") from None
        if not isinstance(body, dict):
            raise BadCommand("the body must be a JSON object")
        return body

    def _forward(self) -> None:
        """The runtime's own answer: /live, /health, /metrics and the files of the model card."""
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            # Nobody reads the body: it would be taken for the next request, which a page could so send.
            self.close_connection = True
        connection = http.client.HTTPConnection(*self.server.owner.behind, timeout=BEHIND_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request(
                    self.command, self.path, headers={"Accept": self.headers.get("Accept", "*/*")}
                )
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):
                self._send(503, b"the runtime's server does not answer\n", {"Content-Type": "text/plain"})
                return
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in _PER_CONNECTION}
        self._send(answer.status, content, headers)

    def _send_json(self, status: int, reply: Reply) -> None:
        self._send(status, json.dumps(reply).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.connection.settimeout(SEND_SECONDS)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status == system_callers.Unauthorized.status:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("system port: " + format, *args)  # noqa: G003


class TooLarge(BadCommand):
    status = 413
