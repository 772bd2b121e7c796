"""Hands out free ports of this machine in one place, each to one process only."""

from __future__ import annotations

import itertools
import random
import socket
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterable

# The runtime accepts no system port above 32767; Linux uses ports above that for outgoing connections.
_FIRST, _LAST = 20000, 32767
_candidates = itertools.count(random.randrange(_LAST - _FIRST))
_named: set[int] = set()


def leave_out(named: Iterable[int]) -> None:
    """Ports that the user chose for a process, which listens there once it has started."""
    _named.update(named)


def free() -> int:
    """Return a port that is free now, a different one at each call; the caller must use it soon."""
    for number in itertools.islice(_candidates, _LAST - _FIRST):
        port = _FIRST + number % (_LAST - _FIRST + 1)
        if port not in _named and _is_free(port):
            return port
    raise StartError(f"found no free port from {_FIRST} to {_LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
