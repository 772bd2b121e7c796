"""Measures CPU time and memory of the processes under load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import psutil

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MB = 1024 * 1024


class ProcessFigures(msgspec.Struct, frozen=True):
    """What a watched process used during a stage."""

    cpu_seconds: float
    cpu_us_per_token: float | None
    tree_cpu_seconds: float
    tree_cpu_us_per_token: float | None
    rss_mb: float
    """Memory of the process and its descendants at the end of the stage; shared pages count in each."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """CPU seconds by process, and memory, of a process and its descendants at one moment."""

    cpu: dict[tuple[int, float], float]
    own: float
    rss: int


class ProcessWatch:
    """The watched processes by label."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {}
        for label, pid in pids.items():
            try:
                self._processes[label] = psutil.Process(pid)
            except psutil.NoSuchProcess:
                raise ConfigError(f"--watch {label}={pid}: there is no such process") from None

    def sample(self) -> dict[str, ProcessSample]:
        """Sample all processes; those that have ended are left out."""
        found = {}
        for label, process in self._processes.items():
            try:
                found[label] = _sample(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def _sample(root: psutil.Process) -> ProcessSample:
    cpu, rss = {}, 0
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                cpu[(process.pid, process.create_time())] = cpu_seconds(process)
                rss += process.memory_info().rss
        except psutil.NoSuchProcess:
            if process is root:
                raise
    return ProcessSample(cpu, cpu[(root.pid, root.create_time())], rss)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def usage_between(
    before: Mapping[str, ProcessSample], after: Mapping[str, ProcessSample], tokens: int
) -> dict[str, ProcessFigures | None]:
    """Return what each process used between two samples; None if it ended between them."""
    used: dict[str, ProcessFigures | None] = {}
    for label, start in before.items():
        end = after.get(label)
        if end is None:
            used[label] = None
            continue
        own = end.own - start.own
        tree = sum(cpu - start.cpu.get(key, 0.0) for key, cpu in end.cpu.items())
        used[label] = ProcessFigures(
            round(own, 3), _per(own, tokens), round(tree, 3), _per(tree, tokens), round(end.rss / _MB, 1)
        )
    return used


def _per(seconds: float, tokens: int) -> float | None:
    return round(seconds * 1e6 / tokens, 2) if tokens else None
