"""Free ports of this machine, handed out in one place: each goes to one process only."""

from __future__ import annotations

import itertools
import random
import socket
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterable

# The runtime takes no system port above 32767; Linux gives outgoing connections ports above that.
_FIRST, _LAST = 20000, 32767
_candidates = itertools.count(random.randrange(_LAST - _FIRST))
_named: set[int] = set()


def leave_out(named: Iterable[int]) -> None:
    """Ports the user named for a process, which listens there when it has started."""
    _named.update(named)


def free() -> int:
    """A port nobody listens on now, another one at each call; whoever asked must take it soon."""
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
