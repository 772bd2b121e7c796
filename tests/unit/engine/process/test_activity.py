"""Tests the vitals of real processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dynamo_vllm.engine.process import activity
from dynamo_vllm.engine.process.activity import Vitals
from dynamo_vllm.engine.vllm import rank_activity
from harness.waiting import until

READY = "print('ready', flush=True);"
SPINS = READY + "\nwhile True: pass"
WAITS = READY + "import sys; sys.stdin.read()"
POLLS = f"import sys, threading; threading.Thread(target=exec, args=({SPINS!r},), daemon=True).start()"
POLLS += "; sys.stdin.read()"
FORKS = f"import os; os.fork() or exec({SPINS!r}); os.wait()"


@contextlib.contextmanager
def running(code: str) -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield child.pid
    finally:
        for below in psutil.Process(child.pid).children():
            below.kill()
        child.kill()
        child.communicate()


def seen(pid: int) -> Vitals:
    found = activity.of_process(pid)
    assert found is not None
    return found


@pytest.mark.parametrize("code", [SPINS, FORKS], ids=["itself", "child"])
def test_process_or_a_child_that_computes(code: str) -> None:
    with running(code) as pid:
        first = seen(pid)
        assert first.is_active
        until("processor time", lambda: seen(pid).cpu_seconds >= first.cpu_seconds + 0.1)


def test_other_threads_than_the_main_one_do_not_count() -> None:
    with running(POLLS) as pid:
        first, whole = seen(pid), psutil.Process(pid)
        used = whole.cpu_times().user
        until("the other thread's time", lambda: whole.cpu_times().user >= used + 0.2)
        assert seen(pid).cpu_seconds < first.cpu_seconds + 0.1


def test_process_that_waits_is_stopped_and_ends() -> None:
    with running(WAITS) as pid:
        until("a waiting process", lambda: not seen(pid).is_active)
        assert not seen(pid).is_stopped
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        until("a stopped process", lambda: seen(pid).is_stopped)
    assert activity.of_process(pid) is None


class Refused(Exception):
    pass


class Nvml:
    """Has the parts of NVML that we use; a MIG instance has no figures."""

    NVMLError = Refused

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 9:
            raise Refused
        return SimpleNamespace(gpu={4: 0, 5: 37}[handle])


def test_utilisation_of_a_gpu() -> None:
    platform: Any = SimpleNamespace(device_id_to_physical_device_id=[4, 5, 9].__getitem__)
    found = [rank_activity.utilisation(Nvml(), platform, device) for device in range(4)]
    assert found == [0, 37, 0, 0]
