"""A worker's folder ends with it, also when it was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dynamo_vllm.errors import StartError
from dynamo_vllm.serving import scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold(said: Connection) -> None:
    with scratch.folder() as made:
        said.send(made)
        signal.pause()


def test_folder_goes_with_its_worker(temporary: Path) -> None:
    with scratch.folder() as made:
        assert Path(made).is_dir()
    assert list(temporary.iterdir()) == []


def test_folder_of_a_killed_worker_goes_with_the_next_one(temporary: Path) -> None:
    heard, said = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=hold, args=(said,))
    worker.start()
    made = Path(heard.recv())
    (made / "socket").touch()
    scratch.sweep()
    assert made.is_dir(), "it is in use"
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    scratch.sweep()
    assert not made.exists()


def test_folder_of_somebody_else_is_left_alone(temporary: Path) -> None:
    other = temporary / "dynamo-vllm-notes"
    other.mkdir()
    scratch.sweep()
    assert other.is_dir()


def test_machine_without_a_temporary_folder_is_told_what_to_do(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(StartError, match="no temporary folder can be made: No such file.*set TMPDIR"):
        scratch.folder().__enter__()
