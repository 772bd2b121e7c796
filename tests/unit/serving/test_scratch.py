"""A worker's folder ends with it, also when it was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
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


def test_folder_elsewhere_is_new_and_leaves_other_files_alone(temporary: Path) -> None:
    named = temporary / "not" / "there"
    with scratch.folder(str(named)) as first, scratch.folder(str(named)) as second:
        (named / "counter_1.db").touch()
        assert first != second and list(Path(first).glob("*.db")) == []
    assert [path.name for path in named.iterdir()] == ["counter_1.db"]
    with pytest.raises(StartError, match=r"Not a directory; .* another folder than .*counter_1\.db/x"):
        scratch.folder(str(named / "counter_1.db" / "x")).__enter__()


def test_folder_of_somebody_else_is_left_alone(temporary: Path) -> None:
    other = temporary / "dynamo-vllm-notes"
    other.mkdir()
    scratch.sweep()
    assert other.is_dir()


def test_machine_without_a_temporary_folder_is_told_what_to_do(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(StartError, match="cannot create a temporary folder: No such file.*set TMPDIR"):
        scratch.folder().__enter__()


def sweeps(folder: Path) -> bool:
    """Whether it comes to an end."""
    code = "from dynamo_vllm.serving import scratch; scratch.sweep()"
    env = {**os.environ, "TMPDIR": str(folder)}
    try:
        return subprocess.run([sys.executable, "-c", code], env=env, timeout=30).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.parametrize("kind", ["pipe", "link to one", "folder"])
def test_whatever_stands_for_the_lock_holds_nobody_up(temporary: Path, kind: str) -> None:
    """Anybody can make such a folder in /tmp; a pipe is opened when somebody writes to it."""
    planted = temporary / "dynamo-vllm-x"
    planted.mkdir(mode=0o700)
    if kind == "folder":
        (planted / "in-use").mkdir()
    else:
        name = "in-use" if kind == "pipe" else "other"
        os.mkfifo(planted / name)
        if kind != "pipe":
            (planted / "in-use").symlink_to(planted / name)
    assert sweeps(temporary)
    assert planted.is_dir()


def test_folder_in_which_others_can_write_is_not_removed(temporary: Path) -> None:
    planted = temporary / "dynamo-vllm-x"
    planted.mkdir()
    (planted / "in-use").touch()
    planted.chmod(0o777)
    scratch.sweep()
    assert planted.is_dir()
