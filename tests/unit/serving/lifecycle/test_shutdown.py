"""How a process ends: an engine that hangs in its own end does not keep it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from typing import Any

import psutil

from dynamo_vllm.engine.vllm.headless import HeadlessVllm
from dynamo_vllm.serving.lifecycle import shutdown
from harness.processes import survivors

# A process of its own: whatever a process has started is killed with its engine.
HANGING = """
import asyncio, signal, subprocess, sys
from dynamo_vllm.serving.lifecycle import shutdown

class Hanging:
    async def close(self):
        print("ending", flush=True)
        await asyncio.Event().wait()

async def life():
    asked = asyncio.get_running_loop().create_future()
    shutdown.on_signals(asked, lambda: True)
    try:
        asked.set_result(0)
        if sys.argv[1] == "hurried":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
    finally:
        await shutdown.close_engine(Hanging())

shutdown.CLOSE_SECONDS, shutdown.HURRY_SECONDS = map(float, sys.argv[2:])
engine = subprocess.Popen(["sleep", "1000"])
print(engine.pid, flush=True)
sys.stdin.readline()
asyncio.run(life())
"""


class Ending:
    """Such a process, and the one that its engine has started."""

    def __init__(self, *args: str) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", HANGING, *args], text=True, **pipes)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.engine = psutil.Process(int(self.process.stdout.readline()))
        print(file=self.process.stdin, flush=True)  # it may be gone soon after
        assert self.process.stdout.readline() == "ending\n"

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=40)
        assert not survivors([self.engine])
        return self.process.returncode, said


def test_engine_that_does_not_end_is_killed() -> None:
    code, said = Ending("usual", "0.1", "60").ended()
    assert code == 0
    assert "the engine did not end within" in said


def test_signal_while_the_engine_ends_is_heard() -> None:
    hanging = Ending("usual", "60", "60")
    hanging.process.send_signal(signal.SIGTERM)
    assert hanging.ended()[0] == 0


def test_whoever_is_told_twice_hardly_waits() -> None:
    assert "CancelledError" in Ending("hurried", "60", "0.1").ended()[1]


class Slow:
    """Blocks whoever ends it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def shutdown(self) -> None:
        assert self.may_end.wait(30)


async def test_loop_goes_on_while_engines_of_a_node_end() -> None:
    slow = Slow()
    closing = asyncio.create_task(shutdown.close_engine(HeadlessVllm([], slow.shutdown)))
    await asyncio.wait({closing}, timeout=0.05)
    assert not closing.done()
    slow.may_end.set()
    await closing


NOHUP = """
import asyncio, os, signal, sys
from dynamo_vllm.serving.lifecycle import shutdown

async def life():
    asked = asyncio.get_running_loop().create_future()
    shutdown.on_signals(asked, lambda: False)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0)
    print(await asyncio.wait_for(asyncio.shield(asked), 0.2), flush=True)

if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
asyncio.run(life())
"""


def test_hangup_is_heeded_unless_it_was_to_be_ignored() -> None:
    heeded, ignored = (
        subprocess.run([sys.executable, "-c", NOHUP, how], capture_output=True, text=True, timeout=60)
        for how in ("plain", "nohup")
    )
    assert (heeded.returncode, heeded.stdout) == (0, "0\n"), heeded.stderr
    assert ignored.returncode == 1 and "TimeoutError" in ignored.stderr
