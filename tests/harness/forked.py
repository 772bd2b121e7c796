"""What tests of a zygote let its forked processes do: apart from the tests, whose imports take longer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence


def look(fds: Sequence[int], said: str) -> int:
    """In a forked process: what it is like there."""
    found = {
        "said": said,
        "parent": os.getppid(),
        "env": dict(os.environ),
        "leads_session": os.getsid(0) == os.getpid(),
        "pid": os.getpid(),
    }
    os.write(fds[0], json.dumps(found).encode())
    return 7


def wait_for_a_signal(fds: Sequence[int]) -> int:
    os.write(fds[0], b"x")
    signal.pause()
    return 0
