"""`bench plane` on the real runtime."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from harness import commands
from harness.processes import COMMAND, survivors
from harness.stack import environment
from harness.waiting import until

LOAD = ("--concurrency", "4", "--requests", "16", "--output-tokens", "64", "--rounds", "1")


def bench(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = environment(tmp_path, TMPDIR=str(tmp_path))
    return commands.run(env, "bench", "plane", *LOAD, *args, seconds=55)


def test_both_ways_through_a_worker_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "plane.json"
    done = bench(tmp_path, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "dynamo-vllm, direct" in done.stdout and "dynamo-vllm, frontend" in done.stdout
    measured = json.loads(file.read_text())["measured"]["dynamo-vllm"]
    assert measured["direct"][0]["tokens_per_second"] > 0
    assert measured["frontend"][0]["tokens_per_second"] > 0
    started = [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())
    ]
    assert started == [], "everything it started has ended"


def test_peer_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    done = bench(tmp_path, "--no-frontend", "--peer", "other=sh -c 'echo no luck; exit 3'")
    assert done.returncode == 1
    assert "other ended:\nno luck" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_end_is_the_end_of_what_it_has_started(tmp_path: Path, number: signal.Signals) -> None:
    """At any moment: the signal comes while the second process starts, before the bench knows of it."""
    many = ("--concurrency", "4", "--requests", "100000", "--rounds", "9")
    running = subprocess.Popen(
        [*COMMAND, "bench", "plane", *many],
        env=environment(tmp_path, TMPDIR=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until("its processes", lambda: len(psutil.Process(running.pid).children()) >= 2)
    started = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(number)
    assert running.wait(60) == (128 + number if number == signal.SIGTERM else -number)
    assert survivors(started) == []
