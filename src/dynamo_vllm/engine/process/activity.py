"""Reads what an engine's processes are doing, from outside: an engine in a long step answers nobody."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_ACTIVE = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


class Vitals(NamedTuple):
    """The processes of one rank at one moment."""

    cpu_seconds: float
    """Of the threads that run steps, since their start."""
    is_stopped: bool = False
    """One of the processes was stopped, by a signal or a debugger."""
    is_active: bool = False
    """A step's thread runs, waits for a processor or a disk, or a GPU computes."""


def of_process(pid: int) -> Vitals | None:
    """Of an engine core and all that it started: shards, compilers. None once it is gone."""
    try:
        core = psutil.Process(pid)
        every = [core, *core.children(recursive=True)]
    except psutil.Error:
        return None
    found = []
    for process in every:
        with contextlib.suppress(psutil.Error):  # it ended just now
            found.append(_of_one(process))
    return together(found)


def _of_one(process: psutil.Process) -> Vitals:
    """Of the main thread, which runs the steps, and of children that ended.

    Other threads poll without work to do, NIXL's progress thread for one: they would hide a deadlock.
    """
    status, times = process.status(), process.cpu_times()
    main = sum(t.user_time + t.system_time for t in process.threads() if t.id == process.pid)
    return Vitals(main + times.children_user + times.children_system, status in _STOPPED, status in _ACTIVE)


def together(found: Iterable[Vitals]) -> Vitals:
    """Of processes that wait for each other."""
    every = list(found)
    return Vitals(
        sum(one.cpu_seconds for one in every),
        any(one.is_stopped for one in every),
        any(one.is_active for one in every),
    )
