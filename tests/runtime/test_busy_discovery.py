"""The folder of file discovery is locked for longer than the runtime waits, as when many processes start."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.served import Serving, own_environment, start
from harness.stack import stack
from harness.waiting import NotInTime, until

pytestmark = pytest.mark.more

BUSY = "discovery is busy"
FAKE = ("--engine", "fake", "--fake-engine", '{"vocab_size":2000}')


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As another process does it while it reads or changes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_frontend_asks_again(tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        with locked(tmp_path / "discovery" / "v1" / "instances"):
            made.start_frontend()
            log = tmp_path / "frontend.log"
            until("its line", lambda: log.exists() and BUSY in log.read_text())
        until("the frontend", lambda: made.get("/health").status_code == 503)
        assert log.read_text().count(BUSY) == 1


def test_worker_puts_its_card_into_discovery_later(tmp_path: Path, model: Path) -> None:
    with stack(tmp_path) as made:
        made.start_frontend()
        until("the frontend", lambda: made.get("/health").status_code == 503)
        with locked(tmp_path / "discovery" / "v1" / "mdc"):
            worker = made.start_worker("--model", str(model), *FAKE)
            until("its line", lambda: BUSY in worker.log.read_text())
        made.wait_ready()


@pytest.mark.parametrize(
    ("table", "name", "failure"),
    [("instances", "worker-1", "Unable to register"), ("mdc", "frontend", "FileStore mutation lock")],
)
def test_serve_starts_again_what_failed_at_its_first_start(
    tmp_path: Path, table: str, name: str, failure: str
) -> None:
    """Some of the runtime's calls cannot be repeated within a process."""
    discovery = tmp_path / "discovery"
    env = {**own_environment(tmp_path), "DYN_FILE_KV": str(discovery), "DYN_VLLM_CONSOLE": "1"}
    running = start(tmp_path, "--workers", "1", *FAKE, env=env)
    try:
        with locked(discovery / "v1" / table):
            until("the failure", lambda: failure in log_of(name, tmp_path))
        until("its line", lambda: f"{name} exited with code 1, as discovery was busy" in written(running))
        running.wait_ready()
        until("the console", lambda: "console: http" in written(running))
    except NotInTime as exc:
        exc.add_note(f"{running.process.written()}\n--- {name}\n{log_of(name, tmp_path)}")
        raise
    finally:
        running.process.kill()


def log_of(name: str, folder: Path) -> str:
    return "".join(log.read_text() for log in folder.rglob(f"logs/{name}.log"))


def written(running: Serving) -> str:
    assert running.process.poll() is None, running.process.last_lines()
    return running.process.written()
