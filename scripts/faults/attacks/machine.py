"""Scenarios of the machine and its operator: a full disk, signals in an unusual order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil

from faults.deployment import (
    assert_left,
    environment,
    fake_words,
    launcher,
    left_in,
    pids,
    started,
    stopped,
    workers,
)
from faults.others import Others, of_fake_engine
from faults.scenario import Run, Scenario, Seen, needs_root, noted
from harness import served
from harness.bare import Machine, fill
from harness.processes import COMMAND, survivors
from harness.served import Serving
from harness.waiting import until

SIZES = (
    *("4k", "16k", "32k", "64k", "128k", "192k", "256k", "264k", "272k", "288k"),
    *("320k", "384k", "512k", "640k", "768k", "1m", "2m", "4m", "8m", "16m"),
)
"""Of the disk with the run folder, the caches and temporary files; a start needs about a quarter of a MB."""


def full_disk(run: Run) -> Seen:
    """In each run a disk of another size; one on which it starts is filled up afterwards."""
    size = SIZES[(run.number - 1) * 7 % len(SIZES)]
    disk = run.folder / "disk"
    disk.mkdir()
    env = {name: value for name, value in environment(run.folder).items() if name != "XDG_CACHE_HOME"}
    env |= {"HOME": str(disk), "TMPDIR": str(disk)}
    machine = Machine(env=env, folder=str(run.folder), disks={str(disk): size})
    words = [*fake_words(run.model), "--run-dir", str(disk / "run")]
    serving = served.start(run.folder, *words, command=machine.command(*COMMAND), env=launcher())
    process = serving.process
    began = time.monotonic()
    try:
        until("an end or the ready line", lambda: serving.ready_line or process.poll() is not None, 200)
        took = time.monotonic() - began
        if not serving.ready_line:
            return Seen(took, f"disk of {size}: after {took:.1f} s {one_line(serving, disk)}")
        with noted(f"ready on a disk of {size}"):
            return Seen(took, filled_up(serving, disk, size))
    finally:
        process.kill()


def one_line(serving: Serving, disk: Path) -> str:
    """What it said instead of starting."""
    text = serving.output.read_text()
    code = serving.process.wait(30)
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code in (1, 2) and len(lines) == 1, f"exit code {code}: {text[-600:]}"
    assert "No space left on device" in lines[0], lines[0]
    return lines[0].replace(str(disk), "RUN-DIR")


def filled_up(serving: Serving, disk: Path, size: str) -> str:
    before = pids(serving)
    seen = Path(f"/proc/{serving.process.pid}/root{disk}")
    with Others(serving.stack.url, of_fake_engine()) as others:
        filled = fill(seen)
        others.go_on(5)
        full = others.total
        filled.unlink()
        others.go_on()
    assert pids(serving) == before, "a worker was replaced"
    stopped(serving, signal.SIGTERM)
    return f"disk of {size}: started; {full} answers right while full, {others.total - full} afterwards"


# --- signals --------------------------------------------------------------------------------------------


def signals(run: Run) -> Seen:
    """Twice: at the worker, which is replaced, then at all of it, which ends."""
    with started(run.folder, *fake_words(run.model, "--drain-seconds", "5")) as serving:
        url = serving.stack.url
        (worker,) = workers(serving)
        first = psutil.Process(worker.pid)
        in_one_go(worker.system_url, first, [first.pid])
        assert survivors([first], 90) == [], "the worker does not leave"
        until("another worker", lambda: pids(serving) not in ([], [first.pid]), 90)
        until("its answer", lambda: answers(url), 90)
        with Others(url, of_fake_engine()) as others:
            others.go_on()
        (worker,) = workers(serving)
        below = serving.below()
        began = time.monotonic()
        in_one_go(worker.system_url, psutil.Process(worker.pid), [worker.pid, serving.process.pid])
        assert_left(serving, below)
        took = time.monotonic() - began
    assert (left := left_in(run.folder / "tmp")) == [], f"left behind: {left}"
    assert not (run.folder / "run" / "discovery").exists(), "discovery is left behind"
    return Seen(
        took,
        f"worker left and was replaced, {others.total} answers right; then all of it ended in {took:.1f} s, "
        "nothing left behind",
    )


def answers(url: str) -> bool:
    path, body = of_fake_engine(1)[0]
    try:
        return httpx.post(url + path, json=body, timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def in_one_go(system_url: str, worker: psutil.Process, ended: list[int]) -> None:
    """Pause, SIGSTOP, SIGTERM, SIGCONT; the pause is under way when the signals come."""
    with httpx.Client(base_url=system_url, timeout=60) as client:
        assert client.post("/engine/pause", json={}).status_code == 200
        worker.suspend()
        for pid in ended:
            os.kill(pid, signal.SIGTERM)
        worker.resume()


SCENARIOS = (
    Scenario(
        "disk",
        "run folder, caches and temporary files on a small disk, full now or later: answers, or one line",
        full_disk,
        needs_root,
    ),
    Scenario(
        "signals",
        "pause, SIGSTOP, SIGTERM, SIGCONT in one go: the worker is replaced, then `serve` ends; nothing left",
        signals,
    ),
)
