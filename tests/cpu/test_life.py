"""A dead engine ends its worker, a hung one takes it out of service until it answers again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.stack import Stack, Worker, stack, survivors
from harness.waiting import until
from harness.warm import Zygote


@pytest.fixture
def fresh(warm: Zygote, model: Path, tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as made:
        made.start_frontend()
        warm.start_worker(made, model)
        yield made.wait_ready(120)


def engine_core(worker: Worker) -> psutil.Process:
    (core,) = [
        p for p in psutil.Process(worker.pid).children() if "EngineCore" in p.name() or p.children() == []
    ]
    return core


def files_of(worker: Worker) -> list[Path]:
    """Its sockets, and the file that oneDNN writes for profilers."""
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


def test_stopped_engine_core(fresh: Stack) -> None:
    worker = fresh.workers[0]
    core = engine_core(worker)
    core.suspend()
    until("not ready", lambda: not worker.is_ready() and fresh.get("/health").status_code == 503)
    core.resume()
    until("ready again", lambda: worker.is_ready() and fresh.get("/health").status_code == 200)
    answer = fresh.openai.completions.create(model="tiny", prompt=[20, 21], max_tokens=3)
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_sigterm_while_idle_ends_within_seconds(fresh: Stack) -> None:
    worker = fresh.workers[0]
    left = files_of(worker)
    assert left
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    until("the model to go", lambda: fresh.models() == [])
    assert "Traceback" not in worker.log.read_text()
    assert [path for path in left if path.exists()] == []


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


def test_second_signal_ends_at_once_though_the_engine_hangs(fresh: Stack) -> None:
    worker = fresh.workers[0]
    core = engine_core(worker)
    core.suspend()
    worker.signal(signal.SIGTERM)
    until("drained", lambda: "drained in" in worker.log.read_text())
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0, "it had drained"
    assert "force killing" not in worker.log.read_text(), "vLLM does so, when it has waited for five seconds"
    assert not survivors([core])
