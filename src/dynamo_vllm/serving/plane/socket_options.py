"""Finds the sockets that the Rust runtime listens on, in /proc, and sets the options that it leaves out.

On Linux a connection inherits the settings of the socket that accepted it.
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
"""Given up after 17 seconds without a sign of life: a link that is cut for ten loses nothing."""


def set_no_delay(port: int) -> bool:
    """Switch Nagle's algorithm off; whether this process listens on the port.

    The Rust server never sets TCP_NODELAY, which costs some 30 ms on the first token of every reused
    connection.
    """
    for found in _listeners():
        if found.getsockname()[1] == port:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return True
    return False


def notice_lost_machines() -> None:
    """Let the kernel ask whether those who are connected are still there.

    A machine that vanishes says no goodbye. The runtime (1.6.1) would wait for the rest of its answers for
    ever; so it hears that they are broken off, and they go on at another worker.
    """
    for found in _listeners():
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:
            found.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.contextmanager
def kept_here(bind_host: str | None, elsewhere: Collection[int | None]) -> Iterator[None]:
    """While the block runs, let what listens on every address be reached from this machine only.

    Runtime 1.6.1 publishes events on 0.0.0.0, whatever DYN_EVENT_PLANE_HOST says. It makes its sockets when
    it needs them, so a thread looks for new ones. Does nothing for a process that others shall reach, and
    nothing to the ports named `elsewhere`, of which its user says where they listen.
    """
    if bind_host not in LOOPBACK_HOSTS:
        yield
        return
    stop = threading.Event()
    keeping = _KeptHere({port for port in elsewhere if port})
    threading.Thread(target=keeping.run, args=(stop,), name="listeners", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


class _KeptHere:
    def __init__(self, elsewhere: set[int]) -> None:
        self._elsewhere = elsewhere
        self._settled: set[str] = set()
        """Sockets that listen no more than they do now, as /proc calls them."""

    def run(self, stop: threading.Event) -> None:
        pause = LOOK_SECONDS
        while not stop.wait(pause):
            began = time.thread_time()
            try:
                self.look()
            except OSError as exc:
                logger.warning("what this process publishes may be read from other machines: %s", exc)
                return
            # Half a percent of one core; not by the clock, as a look waits for long while an engine starts.
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
                if self._keep(found):
                    self._settled.add(target)

    def _keep(self, found: socket.socket) -> bool:
        """Whether it need not be looked at again: a socket listens some time after it was made."""
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
    except OSError:  # there is no /proc, or no descriptor to read it with
        return []


def _listeners() -> Iterator[socket.socket]:
    """TCP sockets that listen, as duplicates which are closed again."""
    for name in _descriptors():
        with contextlib.suppress(_Closed), _duplicate(name) as found:
            if _listens(found):
                yield found


class _Closed(Exception):
    """The descriptor is closed in the meantime, or no socket."""


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
