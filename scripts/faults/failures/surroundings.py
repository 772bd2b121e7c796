"""Faults around the workers: a frontend that is killed, a disk that stands still, a clock that jumps."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from faults.deployment import environment, fake_words, pids, started
from faults.failures.workers import is_whole, two_fakes
from faults.load import CLOSED, Load, long_answers
from faults.scenario import Counts, Fault, Run, needs_root
from harness import clock as clocks
from harness import listening, processes, served
from harness.processes import COMMAND, free_port
from harness.served import Serving
from harness.waiting import until

CLIENTS, TOKENS = 4, 100
WORKERS = 2
HOUR = 3600

# --- frontends ------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A `serve`, and a frontend beside it that uses the same workers."""

    serving: Serving
    other_url: str

    @property
    def frontend(self) -> psutil.Process:
        """That of `serve`."""
        owners = listening.listeners([process.pid for process in self.serving.below()])
        return psutil.Process(next(one.pid for one in owners if one.port == self.serving.stack.port))

    def is_whole(self) -> bool:
        return is_whole(self.serving) and all(map(is_healthy, (self.serving.url, self.other_url)))


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def two_frontends(folder: Path, model: Path) -> Iterator[Pair]:
    port = free_port()
    with two_fakes(folder, model) as serving:
        words = ("--port", str(port), "--file-kv", str(folder / "run" / "discovery"))
        command = [*COMMAND, "frontend", *words]
        second = processes.start("frontend", command, folder / "second.log", environment(folder))
        try:
            pair = Pair(serving, f"http://127.0.0.1:{port}")
            processes.wait_until("both frontends", [second], pair.is_whole)
            yield pair
        finally:
            second.kill()


def frontend_killed(run: Run) -> Counts:
    """Each run has a `serve` of its own: it waits longer before it starts the same process once more."""
    with (
        two_frontends(run.folder, run.model) as pair,
        Load([pair.serving.url, pair.other_url], long_answers(CLIENTS, TOKENS)) as load,
    ):
        load.in_full_swing()
        victim = pair.frontend
        until("answers from it under way", lambda: is_asked(load, pair.serving.url))
        load.fault()
        victim.send_signal(signal.SIGKILL)
        load.recovered(pair.is_whole)
        assert pair.frontend.pid != victim.pid
    return load.counts()


def is_asked(load: Load, url: str) -> bool:
    """Somebody is in the middle of an answer from there."""
    return any(client.url == url and client.received >= 2 for client in load.clients)


# --- disk -----------------------------------------------------------------------------------------------

IMAGE_MB = 64
SLOW = "for second in 1 2 3 4 5 6 7 8 9 10; do fsfreeze -f {0}; sleep 0.9; fsfreeze -u {0}; sleep 0.1; done"
"""A program of its own: the disk goes on even if this one is killed meanwhile."""


def needs_disk() -> str | None:
    missing = [name for name in ("fsfreeze", "mkfs.ext4", "unshare", "mount") if shutil.which(name) is None]
    return needs_root() or (f"needs {', '.join(missing)}" if missing else None)


@contextlib.contextmanager
def on_a_disk(folder: Path, model: Path) -> Iterator[Serving]:
    """Run folder, caches and temporary files are on a disk of their own, which goes with the last process."""
    disk, image = folder / "disk", folder / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_MB * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    env = {name: value for name, value in environment(folder).items() if name != "XDG_CACHE_HOME"}
    env |= {"HOME": str(disk), "TMPDIR": str(disk)}
    words = [*fake_words(model, "--workers", str(WORKERS), token_ms=10), "--run-dir", str(disk / "run")]
    mounting = f'mount -o loop {image} {disk} && exec "$@"'
    command = ("unshare", "--mount", "sh", "-c", mounting, "sh", *COMMAND)
    with served.served(folder, *words, command=command, env=env) as serving:
        yield serving


def disk_slow(run: Run) -> Counts:
    """Every write waits for most of a second."""
    serving: Serving = run.sites.get(on_a_disk)
    disk = f"/proc/{serving.process.pid}/root{serving.output.parent / 'disk'}"
    before = pids(serving)
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        load.fault()
        subprocess.run(["sh", "-c", SLOW.format(shlex.quote(disk))], check=True, timeout=120)
        load.recovered(lambda: is_whole(serving))
    assert pids(serving) == before, "a worker was replaced"
    return load.counts()


# --- clock ----------------------------------------------------------------------------------------------


def needs_faketime() -> str | None:
    return None if clocks.faketime() is not None else clocks.NEEDS


@contextlib.contextmanager
def by_a_faked_clock(folder: Path, model: Path) -> Iterator[Serving]:
    library = clocks.faketime()
    assert library is not None
    set_clock(folder, 0)
    clock = clocks.environment(library, folder / "clock", os.environ.get("PYTHONPATH", ""))
    clock["FAKETIME_NO_CACHE"] = "1"  # a machine has one clock, which jumps for all processes at once
    env = environment(folder, **clock)
    with started(folder, *fake_words(model, "--workers", str(WORKERS), token_ms=10), env=env) as serving:
        yield serving


def set_clock(folder: Path, ahead: int) -> None:
    fresh = folder / "clock.new"
    fresh.write_text(f"{ahead:+d}")
    fresh.replace(folder / "clock")


def clock_jumps(run: Run) -> Counts:
    """An hour ahead, and back when all processes have gone by that for a while."""
    serving: Serving = run.sites.get(by_a_faked_clock)
    before = pids(serving)
    with Load(serving.url, long_answers(CLIENTS, TOKENS)) as load:
        load.in_full_swing()
        for ahead in (HOUR, 0):
            load.fault()
            set_clock(serving.output.parent, ahead)
            until(f"discovery {ahead} s ahead", partial(all_touched, serving, ahead))
            load.recovered(lambda: is_whole(serving))
    assert pids(serving) == before, "a worker was replaced"
    return load.counts()


def all_touched(serving: Serving, ahead: int) -> bool:
    """Workers and frontend touch their files of discovery every three seconds, by their clock."""
    now = time.time() + ahead
    try:
        times = [path.stat().st_mtime for path in serving.output.parent.glob("run/discovery/v1/*/*")]
    except FileNotFoundError:
        return False
    return times != [] and all(abs(found - now) < HOUR / 4 for found in times)


SCENARIOS = (
    Fault(
        "frontend-killed",
        "one of two frontends gets SIGKILL in mid-stream: clients use the other until it is back",
        frontend_killed,
        explained={
            CLOSED: "the process that held the connection is gone",
            "404": "the new one listens 0.1 s before it knows its models; /health says so",
        },
    ),
    Fault(
        "disk-slow",
        "each write to run folder, caches and temporary files takes up to 0.9 s, for 10 s: answers go on",
        disk_slow,
        needs_disk,
    ),
    Fault(
        "clock-jumps",
        "the wall clock of all processes jumps an hour ahead, and back: answers under way go on",
        clock_jumps,
        needs_faketime,
    ),
)
