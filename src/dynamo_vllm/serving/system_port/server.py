"""The HTTP server of the system port: a thread per connection, and an answer without free descriptors."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dynamo_vllm.serving.system_port.connections import ConnectionPlace, Places

logger = logging.getLogger(__name__)
SPARE_DESCRIPTORS = 4
PAUSE_SECONDS = 0.1
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SystemServer(ThreadingHTTPServer):
    """Reserves a place for every connection, and passes it to the handler as `place`."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = Places()
        self._by_connection: dict[int, ConnectionPlace] = {}
        self._spares = _Spares()
        self._is_on_a_spare = False
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Skip the name lookup of the standard one."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def place(self, connection: socket.socket) -> ConnectionPlace:
        return self._by_connection[id(connection)]

    def busy(self, connection: socket.socket) -> None:
        self._places.busy(self.place(connection))

    def idle(self, connection: socket.socket) -> None:
        self._places.idle(self.place(connection))

    def get_request(self) -> tuple[socket.socket, object]:
        """Answer on a spare descriptor when there are no others.

        The standard server would retry at once, forever: a waiting client keeps its socket readable.
        """
        self._is_on_a_spare = False
        try:
            return super().get_request()
        except OSError as exc:
            if exc.errno not in _NONE_LEFT:
                raise
        self._spares.release_one()
        try:
            self._is_on_a_spare = True
            return super().get_request()
        except OSError:  # another thread was faster
            time.sleep(PAUSE_SECONDS)
            raise

    def service_actions(self) -> None:
        self._spares.fill()

    def process_request(self, request: Any, client_address: Any) -> None:
        place = self._places.take(request, str(client_address[0]))
        if place is None:
            self.shutdown_request(request)
            return
        place.is_for_probes = place.is_for_probes or self._is_on_a_spare
        self._by_connection[id(request)] = place
        if self._is_on_a_spare:
            # Here, one after the other, so that the spare is free again for the next.
            self.process_request_thread(request, client_address)
            self._spares.fill()
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # a limit on threads: none started that would release the place
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        if (place := self._by_connection.pop(id(request), None)) is not None:
            self._places.leave(place)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        self._spares.close()

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a connection to the system port broke off", exc_info=True)


class _Spares:
    """File descriptors kept for the time when there are no others."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self.fill()

    def fill(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            while len(self._held) < SPARE_DESCRIPTORS and not self._is_closed:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release_one(self) -> None:
        with self._lock:
            if self._held:
                os.close(self._held.pop())

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            while self._held:
                os.close(self._held.pop())
