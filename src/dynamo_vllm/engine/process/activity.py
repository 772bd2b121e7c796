"""Reads the CPU time and state of an engine's processes from outside.

An engine does not answer calls during a long step, so only this distinguishes such a step from a hang.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_ACTIVE = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


class Vitals(NamedTuple):
    """Describes the processes of one rank at one moment."""

    cpu_seconds: float
    """The CPU time of the threads that run steps, since their start."""
    is_stopped: bool = False
    """A signal or a debugger has stopped one of the processes."""
    is_active: bool = False
    """A thread that runs steps is running or waits for a core or a disk, or a GPU computes."""


def of_process(pid: int) -> Vitals | None:
    """Returns the vitals of an engine core with its descendants (shards, compilers); None if it ended."""
    try:
        core = psutil.Process(pid)
        every = [core, *core.children(recursive=True)]
    except psutil.Error:
        return None
    found = []
    for process in every:
        with contextlib.suppress(psutil.Error):  # it has just ended
            found.append(_of_one(process))
    return combined(found)


def _of_one(process: psutil.Process) -> Vitals:
    """Returns the vitals of the main thread, which runs the steps, and of children that ended.

    Other threads poll even without work, for example NIXL's progress thread: they would hide a deadlock.
    """
    status, times = process.status(), process.cpu_times()
    main = sum(t.user_time + t.system_time for t in process.threads() if t.id == process.pid)
    return Vitals(main + times.children_user + times.children_system, status in _STOPPED, status in _ACTIVE)


def combined(found: Iterable[Vitals]) -> Vitals:
    """Combines the vitals of processes that wait for each other."""
    every = list(found)
    return Vitals(
        sum(one.cpu_seconds for one in every),
        any(one.is_stopped for one in every),
        any(one.is_active for one in every),
    )
