"""Computes how many file descriptors a process may have, and how many requests they allow.

Every request that a worker answers needs one. If runtime 1.6.1 cannot connect back to the frontend, it
reports no error and the client waits forever. So the runtime is told to refuse requests before that (529).
"""

from __future__ import annotations

import contextlib
import resource

WANTED = 1 << 16


def raise_limit() -> None:
    """Raise the limit as far as the system allows; many systems start at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def request_limit() -> dict[str, str]:
    """Return the runtime's variables for it: half of the limit, because the engine needs some too."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= WANTED:
        return {}
    return {"DYN_ENGINE_REQUEST_LIMIT": str(most // 2), "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "0"}
