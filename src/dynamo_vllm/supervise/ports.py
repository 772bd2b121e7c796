"""Free ports of this machine."""

from __future__ import annotations

import itertools
import random
import socket

from dynamo_vllm.errors import StartError

# The runtime takes no system port above 32767; Linux gives outgoing connections ports above that.
_FIRST, _LAST = 20000, 32767
_candidates = itertools.count(random.randrange(_LAST - _FIRST))


def free() -> int:
    """A port nobody listens on now, another one at each call; whoever asked must take it soon."""
    for number in itertools.islice(_candidates, _LAST - _FIRST):
        port = _FIRST + number % (_LAST - _FIRST + 1)
        if _is_free(port):
            return port
    raise StartError(f"found no free port from {_FIRST} to {_LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
