"""Processes of the servers: started with a log each, waited for, measured, ended with all below them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
STOP_SECONDS = 10


class StartFailed(Exception):
    """A server did not come up; the text says which and what it wrote last."""


@dataclass
class Process:
    label: str
    popen: subprocess.Popen[bytes]
    log: Path

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        return []

    def last_lines(self, count: int = 15) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-count:])


def start(label: str, command: Sequence[str], env: dict[str, str], log: Path) -> Process:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        popen = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,  # a Ctrl-C is for us; our session is kept, so that what ends it ends all
        )
    return Process(label, popen, log)


def stop(processes: Sequence[Process]) -> None:
    """Ask, wait, then end what is left, children too: an engine core may outlive its parent."""
    members = [member for process in processes for member in process.tree()]
    for process in processes:
        if process.popen.poll() is None:
            process.popen.terminate()
    _, left = psutil.wait_procs(members, timeout=STOP_SECONDS)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, timeout=STOP_SECONDS)
    for process in processes:
        process.popen.wait()


def wait_until(
    what: str, processes: Sequence[Process], seconds: float, holds: Callable[[], T | None], pause: float = 0.2
) -> T:
    """The first thing `holds` returns; StartFailed when a process ends or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        for process in processes:
            if (code := process.popen.poll()) is not None:
                raise StartFailed(
                    f"{what}: {process.label} ended with {code}, see {process.log}\n{process.last_lines()}"
                )
        if (found := holds()) is not None:
            return found
        if time.monotonic() > deadline:
            lines = "\n".join(process.last_lines() for process in processes)
            raise StartFailed(f"{what}: not within {seconds:.0f} s\n{lines}")
        time.sleep(pause)


def cpu_share(processes: Sequence[Process], seconds: float) -> float:
    """Cores that the trees of these processes use just now."""
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


def find_below(process: Process, words: Sequence[str]) -> int | None:
    """The id of the process below this one whose name or command holds one of the words."""
    for member in process.tree()[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            text = " ".join([member.name(), *member.cmdline()])
            if any(word in text for word in words):
                return int(member.pid)
    return None


def free_port() -> int:
    """A free port below 32000: the runtime's own servers take none above 32767."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def ask(url: str, body: dict[str, Any] | None = None, seconds: float = 60) -> Any | None:
    """The JSON of a good answer, None otherwise."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """At once or not at all: a run may be killed at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)
