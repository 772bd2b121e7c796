"""Forwards requests to the runtime's own server behind the system port."""

from __future__ import annotations

import contextlib
import http.client
import threading
from dataclasses import dataclass

BEHIND_SECONDS = 30.0
PROBES = ("/live", "/health")
_FILES = "/v1/metadata/"
_PASSED_ON = (*PROBES, "/metrics")
_PER_CONNECTION = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "host",
    "date",
    "server",
}


@dataclass(frozen=True, slots=True)
class RuntimeAnswer:
    status: int
    content: bytes
    headers: dict[str, str]


NO_ANSWER = RuntimeAnswer(503, b"the runtime's server does not answer\n", {"Content-Type": "text/plain"})


def is_forwarded(path: str) -> bool:
    """Return whether the runtime's server answers: health, metrics and the files of the model card."""
    return path in _PASSED_ON or (path.startswith(_FILES) and path.isascii() and path.isprintable())


class RuntimeServer:
    """Calls it, from any thread."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._kept = self._connection()
        self._turn = threading.Lock()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address, timeout=BEHIND_SECONDS)

    def ask(self, method: str, target: str, accept: str) -> RuntimeAnswer:
        """Return its answer; probes reuse a connection, since a new one needs file descriptors."""
        if target in PROBES and self._turn.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    return _send_request(self._kept, method, target, accept)
                self._kept.close()
            finally:
                self._turn.release()
        with contextlib.closing(self._connection()) as connection:
            try:
                return _send_request(connection, method, target, accept)
            except (OSError, http.client.HTTPException):
                return NO_ANSWER

    def close(self) -> None:
        self._kept.close()


def _send_request(
    connection: http.client.HTTPConnection, method: str, target: str, accept: str
) -> RuntimeAnswer:
    connection.request(method, target, headers={"Accept": accept})
    answer = connection.getresponse()
    headers = {k: v for k, v in answer.getheaders() if k.lower() not in _PER_CONNECTION}
    return RuntimeAnswer(answer.status, answer.read(), headers)
