"""`processes`, `restart`, `drain` and `scale`: their words, whom they ask, and what they print."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.cli import main as cli
from dynamo_vllm.cli.running import processes
from dynamo_vllm.supervise.control import server
from dynamo_vllm.supervise.control.messages import Drain, Report, Request, Restart, Scale
from dynamo_vllm.supervise.run_folder import RunFolder
from harness.waiting import until


def test_words_become_a_request() -> None:
    for words, request in {
        "processes": {"verb": "processes"},
        "restart worker-1": {"verb": "restart", "name": "worker-1"},
        "restart --drain-seconds 2 frontend": {"verb": "restart", "name": "frontend", "drain_seconds": 2.0},
        "drain worker-1 --drain-seconds 0": {"verb": "drain", "name": "worker-1", "drain_seconds": 0.0},
        "scale worker 3": {"verb": "scale", "group": "worker", "workers": 3},
        "scale a 0 --drain-seconds 0": {"verb": "scale", "group": "a", "workers": 0, "drain_seconds": 0.0},
    }.items():
        name, *rest = words.split()
        assert processes.understand(name, rest, {})[1] == request


Captured = pytest.CaptureFixture[str]


# --- with a serve ---------------------------------------------------------------------------------------

PROCESS: dict[str, Any] = {
    "name": "worker-1",
    "state": "ready",
    "phase": "ready",
    "pid": 7,
    "group": "worker",
    "role": "agg",
    "restarts": 1,
    "log": "worker-1.log",
}


async def answer(request: Request, report: Report) -> dict[str, Any]:
    if isinstance(request, Restart):
        report({"process": request.name, "phase": "draining"})
        return {"process": PROCESS, "seconds": 2.04}
    if isinstance(request, Drain):
        about = {"model": "m", "role": "agg", "was_last": request.name == "worker-2", "seconds": 0.52}
        return {"process": {**PROCESS, "name": request.name}, **about}
    if isinstance(request, Scale):
        return {"group": "worker", "workers": ["worker-1"], "started": [], "stopped": [], "seconds": 0.0}
    now = 1_800_000_000.0
    waits = {"state": "waiting", "phase": "waiting", "pid": None, "role": None, "group": None}
    killed = {"code": -9, "reason": "was killed by SIGKILL", "at": now - 3700}
    return {
        "at": now,
        "processes": [
            {**PROCESS, "since": now - 65, "last_exit": killed},
            {**PROCESS, **waits, "name": "console", "since": now, "last_exit": None},
            {
                **PROCESS,
                **{"name": "worker-2", "state": "stopped", "phase": "drained", "pid": None, "since": now},
                "last_exit": {"code": 0, "reason": "was stopped", "at": now},
            },
        ],
        "groups": [{"name": "worker", "workers": ["worker-1"]}, {"name": "spare", "workers": []}],
    }


@contextlib.asynccontextmanager
async def serve(path: Path) -> AsyncIterator[RunFolder]:
    folder = RunFolder(path / "run")
    with folder.opened():
        folder.note("http://127.0.0.1:1", {}, path / "control")
        listening = asyncio.create_task(server.listen(path / "control", answer))
        await asyncio.to_thread(until, "the socket", (path / "control").exists)
        try:
            yield folder
        finally:
            listening.cancel()
            await asyncio.wait([listening])


async def run(folder: RunFolder, *words: str) -> int:
    return await asyncio.to_thread(cli.run, [*words, "--run-dir", str(folder.path)])


async def test_processes_are_a_table(tmp_path: Path, capsys: Captured) -> None:
    async with serve(tmp_path) as folder:
        assert await run(folder, "processes") == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME      STATE    SINCE      PID  GROUP   ROLE  RESTARTS  LAST EXIT                             LOG",  # noqa: E501
        "worker-1  ready    1 min 5 s  7    worker  agg   1         was killed by SIGKILL, 1 h 1 min ago  worker-1.log",  # noqa: E501
        "console   waiting  0 s        -    -       -     1         -                                     worker-1.log",  # noqa: E501
        "worker-2  drained  0 s        -    worker  agg   1         was stopped, 0 s ago                  worker-1.log",  # noqa: E501
        "spare: no workers",
    ]


async def test_orders_print_their_result_and_the_way_to_it(tmp_path: Path, capsys: Captured) -> None:
    async with serve(tmp_path) as folder:
        assert await run(folder, "restart", "worker-1") == 0
        assert tuple(capsys.readouterr()) == ("worker-1: ready after 2.0 s, pid 7\n", "worker-1: draining\n")
        assert await run(folder, "restart", "worker-1", "--json") == 0
        assert json.loads(capsys.readouterr().out)["seconds"] == 2.04
        assert await run(folder, "drain", "worker-1") == 0
        assert capsys.readouterr().out == (
            "worker-1: drained and stopped after 0.5 s; 'dynamo-vllm restart worker-1' starts it again\n"
        )
        assert await run(folder, "drain", "worker-2") == 0
        assert "\nno other agg worker of m is in service: requests" in capsys.readouterr().out
        assert await run(folder, "scale", "worker", "1") == 0
        assert capsys.readouterr().out == "worker: 1 worker (nothing to do) after 0.0 s\n"
        assert await run(folder, "scale", "worker", "1000") == 2
        assert "<= 256" in capsys.readouterr().err, "a slip of the keyboard"


async def test_serve_that_takes_no_orders_is_said(tmp_path: Path, capsys: Captured) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.opened():
        assert await run(folder, "processes") == 1
        assert "takes no orders: it is starting, or another version" in capsys.readouterr().err
        folder.note("http://127.0.0.1:1", {}, tmp_path / "gone")
        assert await run(folder, "processes") == 1
        assert f"serve does not answer on {tmp_path / 'gone'}" in capsys.readouterr().err
    assert await run(folder, "processes") == 2
    assert "no serve runs there" in capsys.readouterr().err
