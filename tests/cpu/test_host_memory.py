"""Tests that no start leaves KV caches in /dev/shm, however it ends."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cpu.stopped_starts import CALL, FAILS, REACHED
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from harness.warm import Zygote

pytestmark = pytest.mark.more

FLAGS = ("--kv-offload-gb", "0.05")
MADE = re.compile(r"Created mmap file (/dev/shm/vllm_offload_\S+\.mmap)")


def stopped(made: Stack, warm: Zygote, model: Path, **env: str) -> tuple[Worker, Path]:
    """Returns a worker whose engine has its host memory and is still starting, and the memory's file."""
    reached = made.folder / "reached"
    reached.unlink(missing_ok=True)
    worker = warm.start_node(made, model, *FLAGS, env={REACHED: str(reached), **env}, call=CALL)
    until("the engine has its host memory", reached.exists, 120)
    found = MADE.search(worker.log.read_text())
    assert found, worker.log.read_text()
    return worker, Path(found[1])


def test_start_that_fails_or_is_ended_leaves_nothing(warm: Zygote, model: Path, tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        worker, memory = stopped(made, warm, model, **{FAILS: "yes"})
        assert worker.process.wait(60) != 0 and not memory.exists()
        worker, memory = stopped(made, warm, model)
        assert memory.exists()
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(60) != 0 and not memory.exists()


def test_next_start_removes_what_a_killed_one_left(warm: Zygote, model: Path, tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        made.start_frontend()
        worker, memory = stopped(made, warm, model)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.process.wait(60)
        assert memory.stat().st_blocks * 512 > 40e6
        warm.start_worker(made, model, *FLAGS)
        made.wait_ready(120)
        assert not memory.exists()
        assert not list(Path("/dev/shm").glob(f"*{memory.stem.removeprefix('vllm_offload_')}*"))
