"""`processes`, `restart` and `scale` on a `serve` as a person runs it, while clients stream."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cpu.streams import Load, stream_text
from harness import commands, served
from harness.served import Serving
from harness.waiting import until
from runtime.conftest import fake

pytestmark = pytest.mark.more

TOKENS = 60


@contextlib.contextmanager
def serving(folder: Path, *words: str) -> Iterator[tuple[Serving, Mapping[str, str]]]:
    env = served.own_environment(folder)
    with served.served(folder, *words, env=env) as running:
        yield running, env


def ask(env: Mapping[str, str], *words: str, code: int = 0) -> str:
    done = commands.run(env, *words, seconds=120)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code == 0 else done.stderr


def processes(env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {about["name"]: about for about in json.loads(ask(env, "processes", "--json"))["processes"]}


def instances(running: Serving) -> int:
    listed = running.stack.get("/instances").json()["instances"]
    return sum(found["endpoint"] == "generate" for found in listed)


# --- while clients stream -------------------------------------------------------------------------------

Running = tuple[Serving, Mapping[str, str]]
Texts = dict[int, str]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One worker. Answers take longer than a leaving worker gives them, so that some move in mid-stream."""
    words = (*fake(model, token_ms=20), "--drain-seconds", "1")
    with serving(tmp_path_factory.mktemp("serve"), *words) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(running: Running) -> Texts:
    found = {number: stream_text(running[0].stack, number, max_tokens=TOKENS) for number in range(4)}
    assert all(len(text) >= TOKENS for text in found.values())
    return found


def load_on(running: Running) -> Load:
    return Load(running[0].stack, max_tokens=TOKENS)


def lost_nothing(load: Load, undisturbed: Texts) -> bool:
    assert load.failures == []
    return all(text == undisturbed[number] for number, text in load.texts)


def scale(running: Running, count: int) -> str:
    """Change the number of workers, and wait until the frontend knows."""
    told = ask(running[1], "scale", "worker", str(count))
    until(f"{count} workers", lambda: instances(running[0]) == count)
    return told


def test_group_that_grows_and_shrinks_under_load_loses_nothing(running: Running, undisturbed: Texts) -> None:
    with load_on(running) as load:
        load.settled()
        assert "worker: 3 workers (worker-2, worker-3 started)" in scale(running, 3)
        load.settled(8)
        assert "worker: 1 worker (worker-2, worker-3 stopped)" in scale(running, 1)
        load.settled()
    assert lost_nothing(load, undisturbed)
    assert list(processes(running[1])) == ["frontend", "worker-1"]
    told = ask(running[1], "scale", "worker", "0", code=1)
    assert told == "error: worker has the only agg workers of tiny; keep at least 1, or stop serve\n"


@pytest.mark.parametrize("drain", [[], ["--drain-seconds", "0"]], ids=["drained", "cut-short"])
def test_rolling_restart_under_load_loses_nothing(
    drain: list[str], running: Running, undisturbed: Texts
) -> None:
    scale(running, 2)
    before = processes(running[1])
    with load_on(running) as load:
        for name in ("worker-1", "worker-2"):
            load.settled()
            assert ask(running[1], "restart", name, *drain).startswith(f"{name}: ready after ")
            until("both workers", lambda: instances(running[0]) == 2)
        load.settled()
    after = processes(running[1])
    assert lost_nothing(load, undisturbed)
    for name in ("worker-1", "worker-2"):
        assert after[name]["restarts"] == before[name]["restarts"] + 1
        assert after[name]["pid"] != before[name]["pid"]
    assert after["frontend"]["pid"] == before["frontend"]["pid"]


def test_drained_worker_stays_out_under_load_until_it_is_restarted(
    running: Running, undisturbed: Texts
) -> None:
    scale(running, 2)
    with load_on(running) as load:
        load.settled()
        told = ask(running[1], "drain", "worker-1")
        assert told.startswith("worker-1: drained and stopped after ") and "no other" not in told
        until("one worker", lambda: instances(running[0]) == 1)
        load.settled(8)
        about = processes(running[1])["worker-1"]
        assert (about["state"], about["phase"], about["pid"]) == ("stopped", "drained", None)
        assert "worker-1  drained" in ask(running[1], "processes")
        assert ask(running[1], "restart", "worker-1").startswith("worker-1: ready after ")
        until("both workers", lambda: instances(running[0]) == 2)
        load.settled()
    assert lost_nothing(load, undisturbed)


# --- other deployments ----------------------------------------------------------------------------------


def test_several_serves_are_told_apart_by_their_folders(model: Path, tmp_path: Path) -> None:
    env = served.own_environment(tmp_path)
    assert ask(env, "processes", code=1) == (
        "error: no serve of this user runs on this machine; name its folder with --run-dir\n"
    )
    folders = [tmp_path / "one", tmp_path / "two"]
    with contextlib.ExitStack() as stack:
        for folder in folders:
            folder.mkdir()
            words = (*fake(model), "--run-dir", str(folder / "run"))
            stack.enter_context(served.served(folder, *words, env=env))
        told = ask(env, "restart", "worker-1", code=2)
        assert all(f"  {folder / 'run'}  http://" in told for folder in folders)
        ask(env, "restart", "worker-1", "--run-dir", str(folders[1] / "run"))
        restarts = [
            json.loads(ask(env, "processes", "--json", "--run-dir", str(folder / "run")))["processes"][1]
            for folder in folders
        ]
        assert [about["restarts"] for about in restarts] == [0, 1]
    assert "no serve runs there" in ask(env, "processes", "--run-dir", str(folders[0] / "run"), code=2)
