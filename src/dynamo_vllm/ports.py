"""Reserves free TCP ports of this machine, and refuses ports that are taken.

A process listens only once it has started; vLLM even loads the model first. Until then another process or an
outgoing connection could take a port that was found free. A socket that is bound but does not listen
reserves it: Linux gives the port to nobody who asks for any free one, but a server that sets SO_REUSEADDR, as
ours, the runtime's and ZMQ's do, can still listen there.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterable

# The runtime accepts no system port above 32767; Linux uses ports above that for outgoing connections.
_FIRST, _LAST = 20000, 32767
_TRIES = 50
_candidates = itertools.count(random.randrange(_LAST - _FIRST))
_named: set[int] = set()
_kept: list[socket.socket] = []
"""Stays open for the life of the process."""


def leave_out(named: Iterable[int]) -> None:
    """Ports that the user chose for a process, which listens there once it has started."""
    _named.update(named)


def reserve() -> socket.socket:
    """Return a socket that reserves a free port below 32768 until it is closed."""
    for number in itertools.islice(_candidates, _LAST - _FIRST):
        port = _FIRST + number % (_LAST - _FIRST + 1)
        if port not in _named:
            with contextlib.suppress(OSError):
                return _bound(port)
    raise StartError(f"found no free port from {_FIRST} to {_LAST}")


def number(reserved: socket.socket) -> int:
    """Return the port that a socket reserves."""
    return int(reserved.getsockname()[1])


def reserve_for_life() -> int:
    """Return a free port below 32768, reserved for the life of this process."""
    _kept.append(reserve())
    return number(_kept[-1])


def reserve_in_a_row(count: int) -> int:
    """Reserve this many consecutive free ports for the life of this process; return the first."""
    for _ in range(_TRIES):
        with contextlib.ExitStack() as held:
            first = held.enter_context(_bound(0))
            port = number(first)
            with contextlib.suppress(OSError, OverflowError):
                others = [held.enter_context(_bound(port + offset)) for offset in range(1, count)]
                held.pop_all()
                _kept.extend([first, *others])
                return port
    raise StartError(
        f"could not find {count} consecutive free ports; set --kv-event-port and --side-channel-port"
    )


def _bound(port: int) -> socket.socket:
    """Return a socket bound to a port that no other socket is bound to.

    SO_REUSEADDR is set only after the bind, because before it would allow sharing a port.
    """
    made = socket.socket()
    try:
        made.bind(("", port))
    except (OSError, OverflowError):
        made.close()
        raise
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def refuse_taken(option: str, host: str, port: int) -> None:
    """Raise if a port is in use. The Rust servers would only log it and run without the port, and vLLM 0.30
    waits forever if its side channel cannot listen."""
    if reason := _why_taken(host, port):
        raise StartError(
            f"{option} {port} on {host or 'any address'} cannot be used: {reason}; choose another"
        )


def is_taken(host: str, port: int) -> bool:
    return _why_taken(host, port) is not None


def _why_taken(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return exc.strerror or type(exc).__name__
    return None
