"""Serves admin verbs on the system port, and forwards everything else to the runtime's server behind it.

The runtime's own server has only two statuses for a verb, shows exception texts to callers and sees neither
their address nor their headers. It uses threads, because /live must answer while the engine starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from dynamo_vllm.admin.verbs import failure
from dynamo_vllm.errors import AdminError, BadCommand, StartError, WrongState
from dynamo_vllm.serving.lifecycle.loop_heartbeat import LoopHeartbeat
from dynamo_vllm.serving.system_port import callers
from dynamo_vllm.serving.system_port.routes import NoRoute, route
from dynamo_vllm.serving.system_port.runtime_server import PROBES, RuntimeServer, is_forwarded
from dynamo_vllm.serving.system_port.server import SystemServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from dynamo_vllm.admin.base import Reply
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.serving.admin.endpoint import Admin

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
MAX_DIGITS = 20
"""Digits of a length: Python refuses to parse a number of some thousands."""
PAUSE_SECONDS = 30.0
HEADER_SECONDS = 5.0
BODY_SECONDS = 30.0
PROBE_SECONDS = 0.5
"""Time for all headers of a request when connections are scarce."""
SEND_SECONDS = 10.0
STOP_SECONDS = 0.1
_ADMIN = ("/engine/", "/v1/loras")


class SystemPort:
    """Listens from the start; verbs work once `admin` is set."""

    def __init__(self, host: str, port: int, behind: tuple[str, int]) -> None:
        self.admin: Admin | None = None
        self.behind = RuntimeServer(*behind)
        self.loop = asyncio.get_running_loop()
        self.pulse: LoopHeartbeat | None = None
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
        """From now on /live depends on the worker's loop, which a starting engine blocks for minutes."""
        self.pulse = LoopHeartbeat(self.loop)

    def close(self) -> None:
        if self.pulse is not None:
            self.pulse.stop()
        self._server.shutdown()
        self._server.server_close()
        self.behind.close()

    def perform(self, admin: Admin, name: str, body: object) -> Reply:
        """Called in a connection's thread; runs on the worker's loop."""
        return asyncio.run_coroutine_threadsafe(admin.perform(name, body), self.loop).result()


@contextlib.contextmanager
def opened(options: WorkerOptions, runtime_port: int | None) -> Iterator[SystemPort | None]:
    """Return the server; None if the worker has no system port."""
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


class _Server(SystemServer):
    def __init__(self, address: tuple[str, int], owner: SystemPort) -> None:
        self.owner = owner
        super().__init__(address, _Handler)


class _Reader(io.RawIOBase):
    """Read from a client until `deadline`; a socket timeout would start again with every byte."""

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
        """An idle connection may wait long, since it can be closed; a started request may not."""
        is_for_probes = self.server.place(self.connection).is_for_probes
        self._within(PROBE_SECONDS if is_for_probes else PAUSE_SECONDS)
        try:
            if self.rfile.peek(1):  # type: ignore[attr-defined]
                self._within(PROBE_SECONDS if is_for_probes else HEADER_SECONDS)
                super().handle_one_request()
                self.close_connection = self.close_connection or is_for_probes
                self.server.idle(self.connection)
                return
        except OSError:  # the time was up, or the client has gone
            logger.debug("a connection to the system port broke off", exc_info=True)
        self.close_connection = True

    def _within(self, seconds: float) -> None:
        self._reader.deadline = time.monotonic() + seconds

    def _answer(self) -> None:
        self.server.busy(self.connection)
        self._within(BODY_SECONDS)
        try:
            self._respond(path_of(self.path))
        except BadCommand as exc:
            self.close_connection = True
            self._send_json(exc.status, failure(exc))
        except OSError:  # the client has gone
            raise
        except Exception:
            logger.exception("a request to the system port failed")
            self.close_connection = True
            self._send_json(
                AdminError.status, failure(AdminError("the request failed; see the worker's log"))
            )

    def _respond(self, path: str) -> None:
        admin, pulse = self.server.owner.admin, self.server.owner.pulse
        stuck_seconds = pulse.stuck_seconds if pulse is not None else None
        if path in PROBES and stuck_seconds is not None:
            message = f"the worker's event loop has been blocked for {stuck_seconds:.0f} s"
            self._send_json(503, {"status": "stuck", "message": message})
        elif path not in PROBES and self.server.place(self.connection).is_for_probes:
            self.close_connection = True
            self._send_json(503, failure(Busy("too many connections to this port; try again")))
        elif path.startswith(_ADMIN):
            reply = self._verb(path)
            self._send_json(int(reply.get("code", 200)), reply)
        elif path == "/live" and admin is not None and admin.is_at_rest:
            # The runtime reports here what it reports at /health, and a supervisor would replace the worker.
            self._send_json(200, {"status": "resting"})
        else:
            self._forward(path)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _answer

    def _verb(self, path: str) -> Reply:
        try:
            admin = self.server.owner.admin
            if admin is None:
                raise WrongState("this worker is still starting")
            callers.check(admin, self.client_address[0], self.headers)
            verb, fields = route(self.command, path)
            return self.server.owner.perform(admin, verb, self._body() | fields)
        except AdminError as exc:
            # The rest of the body would be read as the next request.
            self.close_connection = True
            return failure(exc)

    def _body(self) -> dict[str, Any]:
        if "Transfer-Encoding" in self.headers:
            raise BadCommand("send the body with a Content-Length")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) > 1 or not lengths[0].isdecimal() or len(lengths[0]) > MAX_DIGITS:
            raise BadCommand(f"Content-Length is {', '.join(lengths)[:80]!r}; send one number")
        length = int(lengths[0])
        if length > MAX_BODY_BYTES:
            self.rfile.read(min(length, 2 * MAX_BODY_BYTES))  # clients send all before they read
            raise TooLarge(f"the body has {length} bytes; at most {MAX_BODY_BYTES} are allowed")
        raw = self.rfile.read(length)
        if len(raw) < length:
            raise BadCommand(f"the body ended after {len(raw)} of {length} bytes")
        try:
            body = msgspec.json.decode(raw) if raw.strip() else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise BadCommand(f"the body is not JSON: {exc}") from None
        if not isinstance(body, dict):
            raise BadCommand("the body must be a JSON object")
        return body

    def _forward(self, path: str) -> None:
        """Return the runtime's own answer."""
        if not is_forwarded(path):
            raise NoRoute(f"there is no {path[:200]} here")
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            # Nobody reads the body: it would be taken as the next request, which a web page could exploit.
            self.close_connection = True
        answer = self.server.owner.behind.ask(self.command, self.path, self.headers.get("Accept", "*/*"))
        self._send(answer.status, answer.content, answer.headers)

    def _send_json(self, status: int, reply: Reply) -> None:
        self._send(status, json.dumps(reply).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.connection.settimeout(SEND_SECONDS)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status == callers.Unauthorized.status:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what the standard server cannot parse with our own JSON, not with its HTML page."""
        self.close_connection = True
        refused = {
            **failure(BadCommand(f"this is not a valid request: {message or code}")),
            "code": int(code),
        }
        self._send_json(code, refused)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("system port: " + format, *args)  # noqa: G003


class TooLarge(BadCommand):
    status = 413


class Busy(AdminError):
    status, kind = 503, "busy"


def path_of(target: str) -> str:
    """Return the path of a request."""
    with contextlib.suppress(ValueError):  # half an address
        if target.isascii() and target.isprintable():
            return urlsplit(target).path
    raise BadCommand(f"{target[:200]!r} is not a path; write other characters as %XX, in UTF-8")
