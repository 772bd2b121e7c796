"""The supervisor over small real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.supervise import discovery
from harness.kept import FAILS, LIMITS, SLOW, kept, worker
from harness.waiting import until


async def test_killed_worker_whose_logs_are_gone_is_replaced_at_other_ports(tmp_path: Path) -> None:
    async with kept(tmp_path) as found:
        other = found.pid("worker-2")
        first = [*found.ports("worker-1"), *found.ports("worker-2")]
        shutil.rmtree(found.logs)
        os.kill(found.pid("worker-1"), signal.SIGKILL)
        await found.ready("worker-1", times=2)
        assert found.pid("worker-2") == other
        assert "worker-1 was killed by SIGKILL; starting it again" in found.said
        assert (found.logs / "worker-1.log").exists()
        assert len({*first, *found.ports("worker-1")}) == 6


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


# --- what is not essential ------------------------------------------------------------------------------

CONSOLE: dict[str, Any] = {"role": None, "group": "", "is_essential": False, "url": "http://127.0.0.1:9/"}


async def test_extra_process_that_always_fails_is_said_once_and_keeps_nothing_from_serving(
    tmp_path: Path,
) -> None:
    limits = dataclasses.replace(LIMITS, restarts=2, retry_seconds=0.01)
    async with kept(tmp_path, limits, beside=[worker("console", FAILS, **CONSOLE)]) as found:
        await found.prints("ready: ")
        for _ in range(5):
            before = (await found.processes())["console"]["restarts"]
            while (await found.processes())["console"]["restarts"] == before:
                await asyncio.sleep(0)
        about = (await found.processes())["console"]
    assert (about["kind"], about["essential"], about["last_exit"]["code"]) == ("console", False, 1)
    told = [line for line in found.said.splitlines() if "console" in line]
    assert [line.partition(" ")[2].partition(" (log")[0] for line in told] == [
        "console: starting (0.0 s)",
        "console exited with code 1: no such thing; everything else goes on, and it is tried again",
    ]
    assert "console" not in found.out


async def test_extra_process_that_is_late_is_shown_when_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with kept(tmp_path, beside=[worker("console", SLOW, **CONSOLE)]) as found:
        await found.prints("ready: ")
        assert len(found.out.splitlines()) == 1
        tmp_path.joinpath("go").touch()
        await found.prints("console: http://127.0.0.1:9/\n")
        assert "console" not in found.targets.read_text()
        os.kill(found.pid("console"), signal.SIGKILL)
        await found.tells("console is ready again")
    assert [line.split()[0] for line in found.out.splitlines()] == ["ready:", "console:"]


async def test_extra_process_that_cannot_even_be_started_is_tried_again(tmp_path: Path) -> None:
    console = dataclasses.replace(worker("console", **CONSOLE), argv=("/no/such/program",))
    async with kept(tmp_path, beside=[console]) as found:
        await found.tells("console could not be started: ")
        await found.prints("ready: ")
    assert found.said.count("could not be started") == 1
