"""Tests that a process ends with its parent, and its children with it; without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from dynamo_vllm.engine.process.parent import PARENT_VARIABLE
from harness.processes import kill_tree, survivors

# A worker, its engine core and a worker of that: each says its pid and waits for nothing.
TREE = f"""
import os, signal
from dynamo_vllm.engine.patches.plugin import end_with_parent
os.environ["{PARENT_VARIABLE}"] = str(os.getpid())
if os.fork() == 0:
    end_with_parent()
    if os.fork() == 0:
        end_with_parent()
    os.write(1, b"%d %d\\n" % (os.getpid(), os.getpgid(0)))
signal.pause()
"""


@contextmanager
def tree() -> Iterator[tuple[psutil.Process, list[psutil.Process]]]:
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        lines = [worker.stdout.readline().split() for _ in range(2)]
        below = [psutil.Process(int(pid)) for pid, _ in lines]
        try:
            assert all(pid == group for pid, group in lines), "each in a group of its own"
            yield psutil.Process(worker.pid), below
        finally:
            for pid in (worker.pid, *(process.pid for process in below)):
                kill_tree(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("killed", ["worker", "engine core"])
def test_killed_process_ends_all_its_descendants_and_nothing_above(killed: str) -> None:
    with tree() as (worker, below):
        (core,) = [process for process in below if process.ppid() == worker.pid]
        (worker if killed == "worker" else core).kill()
        assert survivors(below, 5) == []
        assert killed == "worker" or worker.is_running()


def test_process_of_another_parent_is_left_alone() -> None:
    script = (
        "import os\nfrom dynamo_vllm.engine.patches.plugin import end_with_parent\n"
        "end_with_parent()\nprint(os.getpgid(0) == os.getpid())"
    )
    env = {**os.environ, PARENT_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
