"""Observes the servers of a run from outside: the CPU time they use, and their answers."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.processes import Started


def cpu_share(processes: Sequence[Started], seconds: float) -> float:
    """Return how many cores these processes and their descendants use now."""
    members = [member for process in processes for member in process.tree()]
    before = _cpu_seconds(members)
    time.sleep(seconds)
    return (_cpu_seconds(members) - before) / seconds


def _cpu_seconds(members: Sequence[psutil.Process]) -> float:
    total = 0.0
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def find_below(process: Started, words: Sequence[str]) -> int | None:
    """Return the id of the descendant whose name or command contains one of the words."""
    for member in process.below():
        with contextlib.suppress(psutil.NoSuchProcess):
            text = " ".join([member.name(), *member.cmdline()])
            if any(word in text for word in words):
                return int(member.pid)
    return None


def ask(url: str, body: dict[str, Any] | None = None, seconds: float = 60) -> Any | None:
    """Return the JSON of a successful response; None otherwise."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write the file atomically, because a run may be killed at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)
