"""Counts the cores that a CPU engine may use, and sets how its threads wait. Imports no torch or vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BIND = "VLLM_CPU_OMP_THREADS_BIND"
COUNT = "OMP_NUM_THREADS"
WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""Makes an idle thread sleep at once, with GNU's and with Intel's OpenMP."""
_QUOTAS = (("cpu.max", None), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""The files with the CPU quota and its period, in microseconds: one file in cgroups v2, two in v1."""


def cpu_thread_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that OpenMP reads when it is loaded: they must be set before Python starts.

    By default OpenMP's threads spin while they wait. If another program is busy on the machine, every step
    then waits for a thread that the kernel has taken off its core. The user's own settings win.
    """
    if environment.get(BIND):
        return {}
    return {name: value for name, value in WAITING.items() if not environment.get(name)}


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Returns whether the user's environment sets the number of threads."""
    return bool(environment.get(COUNT) or environment.get(BIND))


def usable_cores(cgroups: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """Returns how many cores this process may use: its CPU affinity, limited by the container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _quotas(Path(cgroups), Path(own)))]))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yields every CPU quota that applies to this process, in cores."""
    for folder in _groups(cgroups, own):
        for quota_file, period_file in _QUOTAS:
            try:
                words = (folder / quota_file).read_text().split()
                words += (folder / period_file).read_text().split() if period_file else []
                quota, period = int(words[0]), int(words[1])
            except (OSError, ValueError, IndexError):  # not this version, or no quota ("max")
                continue
            if quota > 0 and period > 0:  # version 1 writes -1 for none
                yield quota / period


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of the process's cgroup and its parents; a container often sees only the top one."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "1:cpu:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = cgroups / controllers
        group = top / path.strip("/")
        while group != top.parent:
            yield group
            group = group.parent
