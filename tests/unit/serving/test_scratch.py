"""A worker's folder ends with it, also when it was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
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


def test_folder_elsewhere_is_new_and_leaves_other_files_alone(temporary: Path) -> None:
    named = temporary / "not" / "there"
    with scratch.folder(str(named)) as first, scratch.folder(str(named)) as second:
        (named / "counter_1.db").touch()
        assert first != second and list(Path(first).glob("*.db")) == []
    assert [path.name for path in named.iterdir()] == ["counter_1.db"]
    with pytest.raises(StartError, match=r"Not a directory; .* another folder than .*counter_1\.db/x"):
        scratch.folder(str(named / "counter_1.db" / "x")).__enter__()


def test_machine_without_a_temporary_folder_is_told_what_to_do(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(StartError, match="cannot create a temporary folder: No such file.*set TMPDIR"):
        scratch.folder().__enter__()


def planted(temporary: Path, mode: int = 0o700) -> Path:
    """A folder that anybody can make in /tmp."""
    folder = temporary / "dynamo-vllm-x"
    folder.mkdir()
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize("kind", ["pipe", "link to one", "folder"])
def test_whatever_stands_for_the_lock_holds_nobody_up(temporary: Path, kind: str) -> None:
    """A pipe is opened when somebody writes to it."""
    folder = planted(temporary)
    if kind == "folder":
        (folder / "in-use").mkdir()
    else:
        os.mkfifo(folder / ("in-use" if kind == "pipe" else "other"))
        if kind != "pipe":
            (folder / "in-use").symlink_to(folder / "other")
    sweeping = threading.Thread(target=scratch.sweep, daemon=True)
    sweeping.start()
    sweeping.join(30)
    assert not sweeping.is_alive()
    assert folder.is_dir()


@pytest.mark.parametrize(("mode", "has_lock"), [(0o777, True), (0o700, False)])
def test_folder_in_which_others_can_write_or_without_a_lock_is_left_alone(
    temporary: Path, mode: int, has_lock: bool
) -> None:
    folder = planted(temporary, mode)
    if has_lock:
        (folder / "in-use").touch()
    scratch.sweep()
    assert folder.is_dir()
