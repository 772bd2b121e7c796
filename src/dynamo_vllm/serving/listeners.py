"""The sockets this process listens on, most of which the Rust runtime has made: found in /proc, mended here.

On Linux a connection inherits the settings of the socket that accepted it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def _listeners() -> Iterator[socket.socket]:
    """TCP sockets that listen, as duplicates which are closed again."""
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():
        with contextlib.suppress(OSError):  # closed in the meantime, or no socket of the network
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    yield found
