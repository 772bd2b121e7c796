"""Limits the connections of a server, and chooses which one to close when there are too many.

A connection that waits for its client is *idle*, also in the middle of a request's headers. If there is no
room, the one that has been idle longest is closed, so silent clients keep nobody out.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from dataclasses import dataclass, field

MAX_CONNECTIONS = 128
MAX_PER_PEER = 64
PROBE_CONNECTIONS = 16
"""Reserved connections for /live and /health, used when all others are busy."""


@dataclass(slots=True)
class ConnectionPlace:
    """The state of one connection."""

    connection: socket.socket
    peer: str
    number: int
    """Grows with each connection, and with each request of one."""
    is_for_probes: bool = False
    is_idle: bool = True
    is_open: bool = True


@dataclass(slots=True)
class Places:
    """Thread-safe."""

    _taken: list[ConnectionPlace] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, connection: socket.socket, peer: str) -> ConnectionPlace | None:
        """Reserve a connection, closing an idle one if needed; None if all are busy."""
        with self._lock:
            place = ConnectionPlace(connection, peer, next(self._numbers))
            ordinary = [taken for taken in self._taken if not taken.is_for_probes]
            of_peer = [taken for taken in ordinary if taken.peer == peer]
            is_full = len(of_peer) >= MAX_PER_PEER or len(ordinary) >= MAX_CONNECTIONS
            if is_full and not self._drop_idle(of_peer if len(of_peer) >= MAX_PER_PEER else ordinary):
                place.is_for_probes = True
                probes = [taken for taken in self._taken if taken.is_for_probes]
                if len(probes) >= PROBE_CONNECTIONS and not self._drop_idle(probes):
                    return None
            self._taken.append(place)
            return place

    def _drop_idle(self, places: list[ConnectionPlace]) -> bool:
        """Close the connection that has been idle longest; its thread then notices."""
        idle = [place for place in places if place.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda place: (_has_sent(place.connection), place.number))
        self._taken.remove(oldest)
        oldest.is_open = False
        with contextlib.suppress(OSError):  # the client has gone
            oldest.connection.shutdown(socket.SHUT_RDWR)
        return True

    def leave(self, place: ConnectionPlace) -> None:
        """Call before the connection is closed: its descriptor may be reused afterwards."""
        with self._lock:
            if place.is_open:
                place.is_open = False
                self._taken.remove(place)

    def busy(self, place: ConnectionPlace) -> None:
        """Mark as busy: a complete request has arrived."""
        with self._lock:
            place.is_idle = False

    def idle(self, place: ConnectionPlace) -> None:
        with self._lock:
            place.is_idle, place.number = True, next(self._numbers)


def _has_sent(connection: socket.socket) -> bool:
    """Return whether its thread only has to read: a probe that has just arrived."""
    waiting = select.poll()
    try:
        waiting.register(connection, select.POLLIN)
    except ValueError:  # closed
        return False
    return bool(waiting.poll(0))
