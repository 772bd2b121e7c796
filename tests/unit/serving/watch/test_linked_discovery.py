"""The part of file discovery that a caller follows through links."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.serving.watch import owned_folder
from dynamo_vllm.serving.watch.discovery import FolderChanges
from dynamo_vllm.serving.watch.linked_discovery import LinkedDiscovery

ADMIN, OTHER = "ns%2Fadmin%2Fcontrol%2F1", "ns%2Fbackend%2Fgenerate%2F1"


@pytest.fixture
def real(tmp_path: Path) -> Path:
    (tmp_path / "v1" / "instances").mkdir(parents=True)
    for name in (ADMIN, OTHER):
        write(tmp_path, name)
    return tmp_path


def write(real: Path, name: str, text: str = "{}") -> Path:
    path = real / "v1" / "instances" / name
    fresh = path.with_name(".tmp_1")
    fresh.write_text(text)
    return fresh.rename(path)


@contextlib.contextmanager
def followed(real: Path) -> Iterator[LinkedDiscovery]:
    with LinkedDiscovery(real, {"ns/admin/control"}) as linked:
        linked.follow()
        yield linked


def names(linked: LinkedDiscovery) -> set[str]:
    return {path.name for path in (linked.folder / "v1" / "instances").iterdir()}


def test_only_entries_that_are_called_are_linked(real: Path) -> None:
    with followed(real) as linked:
        assert names(linked) == {ADMIN}
        folder = linked.folder
    assert folder != real and not folder.exists()


def test_entries_that_come_change_and_go_are_followed(real: Path) -> None:
    with followed(real) as linked:
        second = write(real, "ns%2Fadmin%2Fcontrol%2F2")
        write(real, ADMIN, "changed")
        linked.follow()
        assert names(linked) == {ADMIN, second.name}
        assert (linked.folder / "v1" / "instances" / ADMIN).read_text() == "changed"
        second.unlink()
        linked.follow()
        assert names(linked) == {ADMIN}


def test_heartbeat_of_a_worker_is_that_of_its_link(real: Path) -> None:
    with followed(real) as linked:
        os.utime(real / "v1" / "instances" / ADMIN, (5, 5))
        assert (linked.folder / "v1" / "instances" / ADMIN).stat().st_mtime == 5


def test_entry_of_a_dead_process_is_linked_once_it_lives(real: Path) -> None:
    os.utime(real / "v1" / "instances" / ADMIN, (5, 5))
    with followed(real) as linked:
        assert names(linked) == set()
        os.utime(real / "v1" / "instances" / ADMIN)
        linked.follow()
        assert names(linked) == {ADMIN}


@pytest.mark.parametrize(("module", "name"), [(os, "link"), (fcntl, "flock")])
def test_folder_is_the_real_one_where_links_or_locks_cannot_be_made(
    real: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(module, name, refused)
    with followed(real) as linked:
        assert linked.folder == real
    assert {path.name for path in real.iterdir()} == {"v1"}


def follow_until_killed(real: Path, said: Connection) -> None:
    with followed(real) as linked:
        said.send(linked.folder)
        signal.pause()


@pytest.fixture
def other(real: Path) -> Iterator[tuple[BaseProcess, Path]]:
    """Another console that follows the same folder, and its links."""
    heard, said = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=follow_until_killed, args=(real, said))
    process.start()
    try:
        yield process, heard.recv()
    finally:
        kill(process)


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def start_another(real: Path) -> None:
    with followed(real):
        pass


def test_folder_without_a_lock_is_removed_after_a_day(real: Path) -> None:
    """Its console was killed while it made the folder; a young one may just be made."""
    young, old = real / "console-young", real / "console-old"
    for folder in (young, old):
        folder.mkdir(0o700)
    os.utime(old, (5, 5))
    start_another(real)
    assert young.exists() and not old.exists()


def test_links_of_a_killed_console_are_removed_by_the_next_one(
    real: Path, other: tuple[BaseProcess, Path]
) -> None:
    process, links = other
    start_another(real)
    assert (links / "v1" / "instances" / ADMIN).exists(), "its console lives"
    kill(process)
    start_another(real)
    assert {path.name for path in real.iterdir()} == {"v1"}
    assert (real / "v1" / "instances" / ADMIN).exists()


@pytest.mark.parametrize("kernel", ["another\n", None])
def test_links_of_a_console_whose_lock_is_not_seen_here_stay_until_it_is_silent_for_a_day(
    real: Path, other: tuple[BaseProcess, Path], monkeypatch: pytest.MonkeyPatch, kernel: str | None
) -> None:
    process, links = other
    kill(process)  # to this machine it looks as a console of another machine that lives
    monkeypatch.setattr(owned_folder, "_KERNEL", real / "kernel")
    if kernel is not None:
        (real / "kernel").write_text(kernel)
    start_another(real)
    assert (links / "v1" / "instances" / ADMIN).exists()
    os.utime(links / "in-use", (5, 5))
    start_another(real)
    assert not links.exists()


def test_console_says_from_time_to_time_that_it_lives(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned = owned_folder.OwnedFolder(real, "console-")
    lock = owned.path / "in-use"
    os.utime(lock, (5, 5))
    owned.touch()
    assert lock.stat().st_mtime == 5
    monkeypatch.setattr(owned_folder, "TOUCH_SECONDS", 0.0)
    owned.touch()
    assert lock.stat().st_mtime > 5
    owned.remove()


def test_touched_files_are_no_change_of_their_folder(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    os.utime(tmp_path, (5, 5))  # long ago
    changes = FolderChanges(tmp_path)
    assert changes.look()
    os.utime(path)
    assert not changes.look()
    (tmp_path / "b").touch()
    assert changes.look()
    assert changes.look(), "another file may have come within the same tick of the clock"
