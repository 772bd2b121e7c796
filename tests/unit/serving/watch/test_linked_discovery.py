"""The part of file discovery that a caller follows through links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def names(linked: LinkedDiscovery) -> set[str]:
    return {path.name for path in (linked.folder / "v1" / "instances").iterdir()}


def test_only_entries_that_are_called_are_linked(real: Path) -> None:
    with LinkedDiscovery(real, {"ns/admin/control"}) as linked:
        linked.follow()
        assert names(linked) == {ADMIN}
        folder = linked.folder
    assert folder != real and not folder.exists()


def test_entries_that_come_change_and_go_are_followed(real: Path) -> None:
    with LinkedDiscovery(real, {"ns/admin/control"}) as linked:
        linked.follow()
        second = write(real, "ns%2Fadmin%2Fcontrol%2F2")
        write(real, ADMIN, "changed")
        linked.follow()
        assert names(linked) == {ADMIN, second.name}
        assert (linked.folder / "v1" / "instances" / ADMIN).read_text() == "changed"
        second.unlink()
        linked.follow()
        assert names(linked) == {ADMIN}


def test_heartbeat_of_a_worker_is_that_of_its_link(real: Path) -> None:
    with LinkedDiscovery(real, {"ns/admin/control"}) as linked:
        linked.follow()
        os.utime(real / "v1" / "instances" / ADMIN, (5, 5))
        assert (linked.folder / "v1" / "instances" / ADMIN).stat().st_mtime == 5


def test_entry_of_a_dead_process_is_linked_once_it_lives(real: Path) -> None:
    os.utime(real / "v1" / "instances" / ADMIN, (5, 5))
    with LinkedDiscovery(real, {"ns/admin/control"}) as linked:
        linked.follow()
        assert names(linked) == set()
        os.utime(real / "v1" / "instances" / ADMIN)
        linked.follow()
        assert names(linked) == {ADMIN}


def test_folder_is_the_real_one_where_links_cannot_be_made(
    real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    with LinkedDiscovery(real, {"ns/admin/control"}) as linked:
        linked.follow()
        assert linked.folder == real
    assert {path.name for path in real.iterdir()} == {"v1"}


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
