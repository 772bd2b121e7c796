"""Finds the cores an engine on CPU may use, and how its threads wait. Imports neither torch nor vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BIND = "VLLM_CPU_OMP_THREADS_BIND"
COUNT = "OMP_NUM_THREADS"
WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""For GNU's and Intel's OpenMP: a thread without work sleeps at once."""
_QUOTAS = (("cpu.max", None), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Microseconds of CPU time and the period they are for, in versions 2 (one file) and 1 of cgroups."""


def cpu_thread_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that OpenMP reads when it is loaded: they must be set before Python starts.

    By default its threads spin while they wait. A busy program beside the engine then makes every step wait
    for a thread that the kernel has taken off its core. What the user set stands.
    """
    if environment.get(BIND):
        return {}
    return {name: value for name, value in WAITING.items() if not environment.get(name)}


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the user's environment says how many threads there are."""
    return bool(environment.get(COUNT) or environment.get(BIND))


def usable_cores(cgroups: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """Cores this process may use: those of its affinity, within the CPU quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _quotas(Path(cgroups), Path(own)))]))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Every quota, in cores, that holds for this process."""
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
    """The process's group and those around it; in a container often its top is all that can be seen."""
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
