"""The connections of a server: how many there may be, and who has to go when there are too many.

A connection that waits for its client is *idle*, also in the middle of a request's headers. When there is no
room, the idle one that has waited longest goes: who connects and says nothing keeps nobody out.
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
"""Places beside the others, where all of those are busy: for /live and /health."""


@dataclass(slots=True)
class ConnectionPlace:
    """One connection's."""

    connection: socket.socket
    peer: str
    number: int
    """Grows with each connection, and with each request of one."""
    is_for_probes: bool = False
    is_idle: bool = True
    is_open: bool = True


@dataclass(slots=True)
class Places:
    """May be used from any thread."""

    _taken: list[ConnectionPlace] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, connection: socket.socket, peer: str) -> ConnectionPlace | None:
        """A place, for which another one may have to go; None where everybody is busy."""
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
        """End the connection that has been idle for longest; its thread then finds it closed."""
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
        """Before the connection is closed: its number may be another's afterwards."""
        with self._lock:
            if place.is_open:
                place.is_open = False
                self._taken.remove(place)

    def busy(self, place: ConnectionPlace) -> None:
        """A whole request is there, and is being answered."""
        with self._lock:
            place.is_idle = False

    def idle(self, place: ConnectionPlace) -> None:
        with self._lock:
            place.is_idle, place.number = True, next(self._numbers)


def _has_sent(connection: socket.socket) -> bool:
    """Whether its thread has only to read: a probe that has just come in."""
    waiting = select.poll()
    try:
        waiting.register(connection, select.POLLIN)
    except ValueError:  # closed
        return False
    return bool(waiting.poll(0))
