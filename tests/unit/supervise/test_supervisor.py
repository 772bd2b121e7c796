"""The supervisor over small real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.supervise import discovery
from dynamo_vllm.supervise.limits import SupervisorLimits
from dynamo_vllm.supervise.planning.process import Plan, Process
from dynamo_vllm.supervise.run_folder import RunFolder
from dynamo_vllm.supervise.screen import Screen
from dynamo_vllm.supervise.supervisor import Supervisor
from harness.waiting import until

LIMITS = SupervisorLimits(max_pause_seconds=0.01, stop_seconds=5.0)
# Ready at once, and nothing else.
SCRIPT = """
import os, signal, sys
os.write(int(sys.argv[-1]), b'{"phase": "ready", "models": ["m"], "instance": 10}\\n')
signal.pause()
"""


def worker(name: str) -> Process:
    return Process(
        name=name,
        argv=(sys.executable, "-IS", "-c", SCRIPT, name),
        env={"DYN_DISCOVERY_BACKEND": "file"},
        health="http://127.0.0.1:{port}/live",
        port=None,
        drain_seconds=0.0,
        role="agg",
    )


class Kept:
    """Two workers that are kept."""

    def __init__(self, folder: RunFolder, err: io.StringIO, life: asyncio.Task[int]) -> None:
        self.logs = folder.logs
        self._err = err
        self._life = life

    @property
    def said(self) -> str:
        return self._err.getvalue()

    def pid(self, name: str) -> int:
        return self._process(name).pid

    def ports(self, name: str) -> list[str]:
        words = self._process(name).cmdline()
        return [words[words.index(flag) + 1] for flag in ("--system-port", "--card-port")]

    def _process(self, name: str) -> psutil.Process:
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # one that has just ended
                found += [child] if name in child.cmdline() else []
        (process,) = found
        return process

    async def ended(self) -> None:
        await asyncio.wait([self._life])

    async def ready(self, name: str, times: int = 1) -> None:
        text = f"{name}: ready"
        await asyncio.to_thread(
            until, f"{text} {times} times", lambda: self._life.done() or self.said.count(text) >= times
        )
        assert not self._life.done(), f"{self._life}\n{self.said}"


@contextlib.asynccontextmanager
async def kept(path: Path, limits: SupervisorLimits = LIMITS, code: int = 0) -> AsyncIterator[Kept]:
    folder, err = RunFolder(path), io.StringIO()
    workers = (worker("worker-1"), worker("worker-2"))
    plan = Plan("http://127.0.0.1:1", "127.0.0.1", 1, ("m",), workers, FrontendOptions())
    with folder.opened():
        life = asyncio.create_task(Supervisor(plan, limits, folder, Screen(io.StringIO(), err)).run())
        made = Kept(folder, err, life)
        try:
            await made.ready("worker-1")
            await made.ready("worker-2")
            yield made
        finally:
            if not life.done():
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait([life])
        assert life.result() == code


async def test_killed_worker_whose_logs_are_gone_is_replaced(tmp_path: Path) -> None:
    async with kept(tmp_path) as found:
        other = found.pid("worker-2")
        shutil.rmtree(found.logs)
        os.kill(found.pid("worker-1"), signal.SIGKILL)
        await found.ready("worker-1", times=2)
        assert found.pid("worker-2") == other
        assert "worker-1 was killed by SIGKILL; starting it again" in found.said
        assert (found.logs / "worker-1.log").exists()


async def test_worker_that_cannot_live_is_given_up_and_tried_again_later(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, restarts=2, retry_seconds=0.2)
    async with kept(tmp_path, limits) as found:
        other = found.pid("worker-2")
        for life in range(1, 5):
            os.kill(found.pid("worker-1"), signal.SIGKILL)
            await found.ready("worker-1", times=life + 1)
        assert found.pid("worker-2") == other
        assert found.said.count("giving up on worker-1 after 2 restarts in a row") == 2
        assert "the others keep serving, and it is started again in 0 s" in found.said
        assert found.said.count("starting it again in 0 s") == 2


async def test_last_worker_that_cannot_live_ends_serve(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, restarts=0, retry_seconds=3600)
    async with kept(tmp_path, limits, code=1) as found:
        os.kill(found.pid("worker-1"), signal.SIGKILL)
        await asyncio.to_thread(until, "giving up", lambda: "giving up on worker-1" in found.said)
        os.kill(found.pid("worker-2"), signal.SIGKILL)
        await found.ended()
        assert "giving up after 0 restarts in a row" in found.said


async def test_no_two_processes_are_given_the_same_port(tmp_path: Path) -> None:
    async with kept(tmp_path) as found:
        first = [*found.ports("worker-1"), *found.ports("worker-2")]
        os.kill(found.pid("worker-1"), signal.SIGKILL)
        await found.ready("worker-1", times=2)
        assert len({*first, *found.ports("worker-1")}) == 6


async def test_log_of_a_worker_is_bounded(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, look_seconds=0.01, log_bytes=1000, log_parts=1)
    async with kept(tmp_path, limits) as found:
        log = found.logs / "worker-1.log"
        with log.open("a") as other:  # whatever writes into it
            other.write("x" * 2000)
        await asyncio.to_thread(until, "its end", lambda: found.logs.joinpath("worker-1.log.1").exists())
        assert log.stat().st_size == 0


async def test_error_of_ours_costs_the_process_it_concerns_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("nobody thought of this")

    async with kept(tmp_path) as found:
        one, other = found.pid("worker-1"), found.pid("worker-2")
        monkeypatch.setattr(discovery, "forget", fail)
        os.kill(one, signal.SIGKILL)
        await found.ready("worker-1", times=2)
        assert found.pid("worker-2") == other
        assert "worker-1 could not be watched (RuntimeError('nobody thought of this'))" in found.said


def test_folder_that_vanishes_does_not_keep_a_worker_in_discovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "v1%2Fworker%2Fa").touch()
        (tmp_path / name / "v1%2Fworker%2Fb").touch()
    scan = os.scandir

    def vanish(path: str) -> object:
        if str(path) == str(tmp_path / "b"):
            shutil.rmtree(path)
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", vanish)
        asyncio.run(discovery.forget(10, {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path)}))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*%2F*"))
    assert left == ["a/v1%2Fworker%2Fb", "c/v1%2Fworker%2Fb"]
