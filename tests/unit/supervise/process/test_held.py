"""The number of a process is its own until what it left behind is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from dynamo_vllm.supervise.planning.process import Process
from dynamo_vllm.supervise.process import child as children
from dynamo_vllm.supervise.process.child import Child
from harness.processes import survivors

# Ends with this code, and leaves a process of its group behind.
LEAVES = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(left.pid, flush=True)
sys.exit(7)
"""


SLEEPS = "import signal; signal.pause()"


async def started(folder: Path, script: str) -> Child:
    argv = (sys.executable, "-IS", "-c", script)
    plan = Process("frontend", argv, dict(os.environ), "http://127.0.0.1:{port}/live", 1, 0.0, None)
    return await children.start(plan, folder / "log", lambda *_: None, children.start_from_scratch)


async def ended(folder: Path, script: str = LEAVES) -> Child:
    """A process that has ended, and was not ended."""
    child = await started(folder, script)
    await child.wait()
    return child


async def test_number_is_kept_until_the_group_is_gone_and_nothing_is_signalled_behind_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await ended(tmp_path)
    left = psutil.Process(int(child.written()))
    assert child.exit_code == 7
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "nobody else can get its number"
    assert await child.destroy() == []
    assert survivors([left]) == []
    assert not psutil.pid_exists(child.pid)
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: signalled.append(group))
    child.kill_group()
    child.terminate()
    assert await child.destroy() == []
    assert signalled == []


async def test_kernel_that_cannot_tell_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    child = await ended(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert child.exit_code == -signal.SIGKILL
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    await child.destroy()
    assert not psutil.pid_exists(child.pid)


async def test_abandoned_process_leaves_no_zombie(tmp_path: Path) -> None:
    child = await started(tmp_path, SLEEPS)
    child.abandon()
    await child.wait()
    await asyncio.sleep(0)
    assert not psutil.pid_exists(child.pid)
