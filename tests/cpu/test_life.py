"""Tests that a dead engine ends its worker, and a hung one is out of service until it answers again."""

from __future__ import annotations

import re
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cpu.faulty_steps import CALL, LOCKED, SLOW, ask, unlock, wait_in_service, wait_out_of_service
from cpu.pairs import ROUNDS
from cpu.ranks import QUICK_WATCH
from cpu.stacks import Start
from harness.processes import survivors
from harness.stack import Stack, Worker
from harness.waiting import until


@pytest.fixture
def fresh(start: Start) -> Stack:
    return start()


@dataclass
class Faulty:
    """Is a worker whose steps do what a prompt asks for."""

    stack: Stack

    def not_ready_during(self, kind: int, seconds: int) -> int:
        """Returns how often it was out of service during a slow step; other requests wait for the step."""
        worker, left = self.stack.workers[0], 0
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(ask, self.stack, [kind] * seconds)
            until("the slow step", lambda: "computing" in worker.log.read_text())
            other = pool.submit(ask, self.stack, [20, 21])
            while not slow.done():
                left += not worker.is_ready() or self.stack.get("/health").status_code != 200
                time.sleep(0.2)
            assert slow.result() == other.result() == 3
        return left

    def deadlock(self) -> float:
        """Returns the seconds until it is out of service, then ends the step."""
        worker, core = self.stack.workers[0], engine_core(self.stack.workers[0])
        locked = worker.log.read_text().count("waiting for a lock")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, self.stack, [LOCKED])
            until("the lock", lambda: worker.log.read_text().count("waiting for a lock") > locked)
            try:
                return wait_out_of_service(self.stack, worker)
            finally:
                unlock(core.pid)
                assert answer.result() == 3


def engine_core(worker: Worker) -> psutil.Process:
    (core,) = [
        p
        for p in psutil.Process(worker.pid).children()
        if "guides" not in p.name() and ("EngineCore" in p.name() or p.children() == [])
    ]
    return core


def files_of(worker: Worker) -> list[Path]:
    """Returns its sockets, and the file that oneDNN writes for profilers."""
    ours = psutil.Process(worker.pid)
    every = [ours, *ours.children(recursive=True)]
    sockets = [Path(str(c.laddr)) for p in every for c in p.net_connections("unix") if c.laddr]
    sockets = [path for path in sockets if path.name != "zygote"]  # of the process they were forked from
    maps = [Path(f"/tmp/perf-{p.pid}.map") for p in every]
    return [path for path in (*sockets, *maps) if path.exists()]


def test_killed_engine_core(fresh: Stack) -> None:
    worker = fresh.workers[0]
    core = engine_core(worker)
    core.kill()
    assert worker.process.wait(60) == 3
    until("the model to go", lambda: fresh.models() == [])
    assert fresh.get("/health").status_code == 503
    assert not psutil.pid_exists(core.pid) or core.status() == psutil.STATUS_ZOMBIE


def test_stopped_engine_core_is_out_of_service_and_sigterm_ends_it_when_it_is_back(fresh: Stack) -> None:
    worker = fresh.workers[0]
    core, left = engine_core(worker), files_of(worker)
    core.suspend()
    wait_out_of_service(fresh, worker)
    assert "its process is stopped" in worker.log.read_text()
    core.resume()
    wait_in_service(fresh, worker)
    assert ask(fresh, [20, 21]) == 3
    assert left
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    until("the model to go", lambda: fresh.models() == [])
    assert "Traceback" not in worker.log.read_text()
    assert [path for path in left if path.exists()] == []


@pytest.mark.more
def test_slow_step_stays_in_service_and_a_deadlock_does_not(start: Start) -> None:
    made = start(*QUICK_WATCH, call=CALL)
    faulty, (worker,) = Faulty(made), made.workers
    left = faulty.not_ready_during(SLOW, seconds=12)
    assert left == 0, "three seconds of silence were a hang before"
    faulty.deadlock()
    wait_in_service(made, worker)
    assert worker.log.read_text().count("slow, not hung") == 1, "a deadlock is not"
    assert "used no processor time for" in worker.log.read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_step_of_a_minute_stays_in_service(start: Start) -> None:
    made = start(call=CALL)
    assert Faulty(made).not_ready_during(SLOW, seconds=60) == 0
    assert ask(made, [20, 21]) == 3


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_stopped_and_deadlocked_engines_are_out_of_service_in_time(start: Start) -> None:
    made = start(call=CALL)
    faulty, (worker,) = Faulty(made), made.workers
    stopped: list[float] = []
    locked: list[float] = []
    for _ in range(ROUNDS):
        core = engine_core(worker)
        core.suspend()
        stopped.append(wait_out_of_service(made, worker))
        core.resume()
        wait_in_service(made, worker)
        locked.append(faulty.deadlock())
        wait_in_service(made, worker)
    print("seconds until out of service:", stopped, locked)
    assert statistics.median(stopped) < 15, stopped
    assert statistics.median(locked) < 30, locked


def test_second_signal_ends_at_once(fresh: Stack) -> None:
    worker = fresh.workers[0]
    stream = fresh.openai.completions.create(
        model="tiny", prompt=[20], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    worker.signal(signal.SIGTERM)
    until("draining", lambda: "draining" in worker.log.read_text())
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 128 + signal.SIGTERM
    stream.close()


def seconds_of_waiting_for_the_core(log: str) -> int:
    """Between vLLM's words about SIGTERM and SIGKILL, which follow at once if our own kill came first."""
    found = re.findall(r"(\d\d):(\d\d):(\d\d) .*(?:send sigterm to|force killing remaining) process", log)
    times = [3600 * int(hour) + 60 * int(minute) + int(second) for hour, minute, second in found]
    return (times[-1] - times[0]) % 86400 if times else 0


def test_second_signal_ends_at_once_though_the_engine_hangs(fresh: Stack) -> None:
    worker = fresh.workers[0]
    core = engine_core(worker)
    core.suspend()
    worker.signal(signal.SIGTERM)
    until("drained", lambda: "drained in" in worker.log.read_text())
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0, "it had drained"
    assert seconds_of_waiting_for_the_core(worker.log.read_text()) < 5, "vLLM kills it after five seconds"
    assert not survivors([core])
