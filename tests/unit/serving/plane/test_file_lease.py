"""The keeper of a process' files in discovery, with files made old."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_vllm.serving.plane.file_lease import LEASE_SECONDS, TOUCHED_SECONDS, FileKeeper

Later = Callable[[float], float]
INSTANCE = 0x5E95A1E124248908
OURS = f"dynamo%2Fbackend%2Fgenerate%2F{INSTANCE:x}"


@pytest.fixture
def instances(tmp_path: Path) -> Path:
    folder = tmp_path / "v1" / "instances"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def keeper(tmp_path: Path, instances: Path) -> FileKeeper:
    (instances / OURS).write_text("ours")
    (instances / "dynamo%2Fbackend%2Fgenerate%2Fabc").write_text("another's")
    made = FileKeeper(tmp_path, INSTANCE)
    made.look()
    return made


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Sets the clock."""

    def set_clock(seconds: float) -> float:
        now = time.time() + seconds
        monkeypatch.setattr("time.time", lambda: now)
        return now

    return set_clock


DAY = 24 * 3600


def make_old(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_file_removed_for_its_age_is_put_back(keeper: FileKeeper, instances: Path, later: Later) -> None:
    for path in list(instances.iterdir()):
        path.unlink()
    tomorrow = later(DAY)
    keeper.look()
    assert [(path.name, path.read_text()) for path in instances.iterdir()] == [(OURS, "ours")]
    assert (instances / OURS).stat().st_mtime == pytest.approx(tomorrow, abs=1), "else it is removed again"


def test_what_the_process_took_out_stays_out(keeper: FileKeeper, instances: Path, later: Later) -> None:
    (instances / OURS).unlink()
    keeper.look()
    later(2 * LEASE_SECONDS)
    keeper.look()
    assert not (instances / OURS).exists()


def test_unreadable_folder_is_not_taken_for_empty(keeper: FileKeeper, instances: Path, later: Later) -> None:
    """So it is without a free descriptor; what was removed meanwhile is put back when there are some."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError):
            keeper.look()
        (instances / OURS).unlink()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    later(2 * LEASE_SECONDS)
    keeper.look()
    assert (instances / OURS).read_text() == "ours"


def test_file_that_grows_old_is_touched(keeper: FileKeeper, instances: Path) -> None:
    for path in instances.iterdir():
        make_old(path, TOUCHED_SECONDS + 2)
    keeper.look()
    ages = {path.name: time.time() - path.stat().st_mtime for path in instances.iterdir()}
    assert ages.pop(OURS) < TOUCHED_SECONDS
    assert min(ages.values()) > TOUCHED_SECONDS, "others look after their own"


def test_publisher_of_events_is_known_by_its_port(tmp_path: Path, instances: Path) -> None:
    def channel(port: int) -> str:
        return json.dumps({"transport": {"kind": "Zmq", "config": {"endpoint": f"tcp://127.0.0.1:{port}"}}})

    with socket.create_server(("127.0.0.1", 0)) as listening:
        (instances / "topic%2F17").write_text(channel(listening.getsockname()[1]))
        (instances / "topic%2F18").write_text(channel(1))
        keeper = FileKeeper(tmp_path, INSTANCE)
        keeper.look()
    for path in instances.iterdir():
        make_old(path, TOUCHED_SECONDS + 2)
    keeper.look()
    ages = {path.name: time.time() - path.stat().st_mtime for path in instances.iterdir()}
    assert ages["topic%2F17"] < TOUCHED_SECONDS < ages["topic%2F18"]


def test_sockets_are_listed_once_for_all_files_of_other_workers(
    keeper: FileKeeper, instances: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many workers sees the files of all others when they start."""
    listed: list[int] = []

    def own_ports() -> set[int]:
        listed.append(1)
        return set()

    monkeypatch.setattr("dynamo_vllm.serving.plane.file_lease._own_ports", own_ports)
    for number in range(20):
        (instances / f"card%2F{number}").write_text("no port")
    keeper.look()
    assert listed == []
    for number in range(20):
        channel = {"transport": {"kind": "Zmq", "config": {"endpoint": f"tcp://127.0.0.1:{number + 1}"}}}
        (instances / f"topic%2F{number}").write_text(json.dumps(channel))
    keeper.look()
    assert listed == [1]


def test_newer_content_is_what_comes_back(keeper: FileKeeper, instances: Path, later: Later) -> None:
    (instances / "new").write_text("newer")
    (instances / "new").rename(instances / OURS)
    keeper.look()
    (instances / OURS).unlink()
    later(DAY)
    keeper.look()
    assert (instances / OURS).read_text() == "newer"
