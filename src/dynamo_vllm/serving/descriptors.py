"""How many file descriptors a process may have, and how many requests that is enough for.

Every request that a worker answers takes one. Where runtime 1.6.1 cannot open the way back to the frontend it
tells nobody, and the client waits without end: so the runtime is told to refuse requests before that (529).
"""

from __future__ import annotations

import contextlib
import resource

WANTED = 1 << 16


def raise_limit() -> None:
    """Take as many as the system lets us have; many systems say 1024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may know better
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def request_limit() -> dict[str, str]:
    """The runtime's variables for it: half of what there is, as the engine needs some too."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= WANTED:
        return {}
    return {"DYN_ENGINE_REQUEST_LIMIT": str(most // 2), "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "0"}
