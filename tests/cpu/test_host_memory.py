"""Tests that no start leaves KV caches in /dev/shm, however it ends."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cpu.stacks import Start
from cpu.stopped_starts import CALL, FAILS, REACHED
from harness.stack import Stack, Worker
from harness.waiting import until

pytestmark = pytest.mark.more

FLAGS = ("--kv-offload-gb", "0.05")
MADE = re.compile(r"Created mmap file (/dev/shm/vllm_offload_\S+\.mmap)")


def stopped(start: Start, made: Stack, **env: str) -> tuple[Worker, Path]:
    """Returns a worker whose engine has its host memory and is still starting, and the memory's file."""
    reached = made.folder / "reached"
    reached.unlink(missing_ok=True)
    worker = start.warm.start_node(made, start.model, *FLAGS, env={REACHED: str(reached), **env}, call=CALL)
    until("the engine has its host memory", reached.exists, 120)
    created = MADE.search(worker.log.read_text())
    assert created, worker.log.read_text()
    return worker, Path(created[1])


def test_start_that_fails_or_is_ended_leaves_nothing(start: Start) -> None:
    made = start.empty()
    worker, memory = stopped(start, made, **{FAILS: "yes"})
    assert worker.process.wait(60) != 0 and not memory.exists()
    worker, memory = stopped(start, made)
    assert memory.exists()
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) != 0 and not memory.exists()


def test_next_start_removes_what_a_killed_one_left(start: Start) -> None:
    made = start.frontend()
    worker, memory = stopped(start, made)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.process.wait(60)
    assert memory.stat().st_blocks * 512 > 40e6
    start.warm.start_worker(made, start.model, *FLAGS)
    made.wait_ready(120)
    assert not memory.exists()
    assert not list(Path("/dev/shm").glob(f"*{memory.stem.removeprefix('vllm_offload_')}*"))
