"""Finds the sockets that the Rust runtime listens on, in /proc, and sets the options that it leaves out.

On Linux an accepted connection inherits the options of its listening socket.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from typing import TYPE_CHECKING

from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.1
_FOLDER = "/proc/self/fd"
_NETWORK = (socket.AF_INET, socket.AF_INET6)

KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 4))
"""Gives up after 17 seconds without an answer, so a link that is cut for ten loses nothing."""


def set_no_delay(port: int) -> bool:
    """Disable Nagle's algorithm; return whether this process listens on the port.

    The Rust server never sets TCP_NODELAY, which costs about 30 ms on the first token of every reused
    connection.
    """
    for found in _listeners():
        if found.getsockname()[1] == port:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return True
    return False


def notice_lost_machines() -> None:
    """Enable TCP keep-alive.

    A machine that vanishes closes no connection, and the runtime (1.6.1) would wait for its answers forever.
    With keep-alive the connection breaks, and the requests continue on another worker.
    """
    for found in _listeners():
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:
            found.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.contextmanager
def restricted_to_loopback(bind_host: str | None, elsewhere: Collection[int | None]) -> Iterator[None]:
    """While the block runs, make sockets that listen on every address reachable only from this machine.

    Runtime 1.6.1 publishes events on 0.0.0.0, whatever DYN_EVENT_PLANE_HOST says. It creates sockets on
    demand, so a thread looks for new ones. Does nothing for a process that other machines may reach, and
    leaves the ports in `elsewhere` alone, for which the user chose an address.
    """
    if bind_host not in LOOPBACK_HOSTS:
        yield
        return
    stop = threading.Event()
    keeping = _LoopbackRestriction({port for port in elsewhere if port})
    threading.Thread(target=keeping.run, args=(stop,), name="listeners", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


class _LoopbackRestriction:
    def __init__(self, elsewhere: set[int]) -> None:
        self._elsewhere = elsewhere
        self._settled: set[str] = set()
        """Sockets that need no further change, as /proc names them."""

    def run(self, stop: threading.Event) -> None:
        pause = LOOK_SECONDS
        while not stop.wait(pause):
            began = time.thread_time()
            try:
                self.look()
            except OSError as exc:
                logger.warning("other machines may be able to read what this process publishes: %s", exc)
                return
            # Half a percent of one core; not by the clock, because a scan takes long while an engine starts.
            pause = max(LOOK_SECONDS, (time.thread_time() - began) * 200)

    def look(self) -> None:
        open_now = {}
        for name in _descriptors():
            with contextlib.suppress(OSError):  # closed in the meantime
                if (target := os.readlink(f"{_FOLDER}/{name}")).startswith("socket:"):
                    open_now[target] = name
        self._settled &= set(open_now)
        for target in open_now.keys() - self._settled:
            with contextlib.suppress(_Closed), _duplicate(open_now[target]) as found:
                if self._restrict(found):
                    self._settled.add(target)

    def _restrict(self, found: socket.socket) -> bool:
        """Return whether the socket is done: it starts to listen some time after it was created."""
        if _listens(found):
            address, port = found.getsockname()[:2]
            if ipaddress.ip_address(address).is_unspecified and port not in self._elsewhere:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
            return True
        if found.family not in _NETWORK or found.type != socket.SOCK_STREAM:
            return True
        try:
            found.getpeername()
        except OSError:  # not connected
            return False
        return True


def _descriptors() -> list[str]:
    try:
        return os.listdir(_FOLDER)
    except OSError:  # no /proc, or no descriptor to read it with
        return []


def _listeners() -> Iterator[socket.socket]:
    """Yield listening TCP sockets as duplicates, which are closed again."""
    for name in _descriptors():
        with contextlib.suppress(_Closed), _duplicate(name) as found:
            if _listens(found):
                yield found


class _Closed(Exception):
    """The descriptor was closed in the meantime, or is not a socket."""


@contextlib.contextmanager
def _duplicate(name: str) -> Iterator[socket.socket]:
    try:
        if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
            raise _Closed
        found = socket.socket(fileno=os.dup(int(name)))
    except OSError:
        raise _Closed from None
    with found:
        yield found


def _listens(found: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return found.family in _NETWORK and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False
