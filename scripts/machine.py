"""Says what the tests need of a machine at the same time, and checks it before they start.

A test that runs out of one of these fails late and for a reason that it does not name.
"""

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dynamo_vllm.serving.plane import inotify

PROCESSES = 2
"""The pytests of a tier that run at the same time."""
DEPLOYMENTS = 3
"""What one pytest has running at the same time: what a file shares, and one or two of a test's own."""
WORKERS = 2
"""The workers of a deployment: one or two in most tests."""
INOTIFY_INSTANCES = DEPLOYMENTS * (inotify.FRONTEND + WORKERS * inotify.WORKER)
PORTS = 500
"""A pytest keeps each port that it gave to a process: about one for each test."""
FEWEST_DESCRIPTORS, DESCRIPTORS = 1024, 4096
"""Of one process: both ends of a test's 400 streams; in a pytest also each port that it keeps."""
FIRST_PORT, LAST_PORT = 20000, 31999
"""`harness.processes.free_port` chooses among these."""


class TooFew(Exception):
    """The machine has too little of something for any of the tests that need it."""


@dataclass(frozen=True)
class Need:
    what: str
    alone: int
    """What one pytest needs."""
    at_once: int
    """What all that run at the same time need."""
    count: Callable[[int], int]
    """Returns how many there are, at most the given number."""
    remedy: str

    def warning(self) -> str | None:
        """Return what is scarce; raise TooFew where the tests cannot run at all."""
        available = self.count(self.at_once)
        if available >= self.at_once:
            return None
        if available < self.alone:
            raise TooFew(f"the tests need {self.alone} {self.what}, and there are {available}; {self.remedy}")
        return (
            f"the tests may need {self.at_once} {self.what} at the same time, and there are {available}; "
            f"{self.remedy}"
        )


def free_ports(most: int) -> int:
    return sum(1 for _, port in zip(range(most), _bindable(), strict=False))


def _bindable() -> Iterator[int]:
    for port in range(FIRST_PORT, LAST_PORT + 1):
        with contextlib.suppress(OSError), socket.socket() as bound:
            bound.bind(("", port))
            yield port


def descriptors(most: int) -> int:
    """Raise this process's limit, which those that it starts inherit, and return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    highest = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft < highest:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], most)


NEEDS = (
    Need(
        "open files in one process",
        FEWEST_DESCRIPTORS,
        DESCRIPTORS,
        descriptors,
        f"raise the limit as root: ulimit -Hn {DESCRIPTORS} (a container: --ulimit nofile={DESCRIPTORS})",
    ),
    Need(
        "free inotify instances",
        INOTIFY_INSTANCES,
        PROCESSES * INOTIFY_INSTANCES,
        inotify.count_left,
        "raise the limit as root: sysctl -w fs.inotify.max_user_instances=1024, or end other deployments",
    ),
    Need(
        f"free ports from {FIRST_PORT} to {LAST_PORT}",
        PORTS,
        PROCESSES * PORTS,
        free_ports,
        "end the programs that listen there: ss -ltnp",
    ),
)
"""In this order: to count inotify instances takes descriptors."""


def warnings(needs: Sequence[Need] = NEEDS) -> list[str]:
    """Return what is scarce; raise TooFew where the tests cannot run at all."""
    return [warning for need in needs if (warning := need.warning()) is not None]
