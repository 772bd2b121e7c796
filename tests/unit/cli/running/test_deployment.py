"""Which deployment a command is about: run folders that are held, and what a user may say instead."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from dynamo_vllm.cli.running import deployment
from dynamo_vllm.config.options import AdminOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.supervise import run_folder
from dynamo_vllm.supervise.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path) -> Mapping[str, str]:
    return {"HOME": str(tmp_path / "home")}


def in_cache(home: Mapping[str, str], name: str) -> RunFolder:
    return RunFolder(run_folder.cache_folder(home) / "run" / name)


# --- run folders ------------------------------------------------------------------------------------------


def test_folder_is_running_while_it_is_held(home: Mapping[str, str], tmp_path: Path) -> None:
    folder, chosen = run_folder.choose(None, home), run_folder.choose(str(tmp_path / "mine"), home)
    assert run_folder.running(home) == []
    with chosen.opened():
        assert [running.path for running in run_folder.running(home)] == [tmp_path / "mine"]
    with folder.opened():
        assert run_folder.running(home) == [folder]
    assert run_folder.running(home) == []
    assert chosen.link is not None and not chosen.link.is_symlink(), "it leaves no link"


def test_link_of_a_killed_serve_is_swept(home: Mapping[str, str], tmp_path: Path) -> None:
    stale = in_cache(home, "20260101-000000-1").path
    stale.parent.mkdir(parents=True)
    stale.symlink_to(tmp_path / "gone")
    assert run_folder.running(home) == []
    assert not stale.is_symlink()


def test_cache_that_cannot_be_written_does_not_keep_serve_from_its_work(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    with run_folder.choose(str(tmp_path / "mine"), {"HOME": str(tmp_path / "home")}).opened():
        pass


def test_somebody_who_looks_does_not_keep_serve_from_its_folder(home: Mapping[str, str]) -> None:
    folder = in_cache(home, "a")
    folder.path.mkdir(parents=True)
    with (folder.path / "lock").open("a+") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with folder.opened():
            assert folder.is_held


# --- the deployment ---------------------------------------------------------------------------------------


def test_the_only_serve_is_meant_unless_the_user_says_another_place(home: Mapping[str, str]) -> None:
    assert deployment.find(AdminOptions(), home) == (AdminOptions(), None)
    with in_cache(home, "a").opened():
        options, folder = deployment.find(AdminOptions(namespace="n"), home)
        assert deployment.find(AdminOptions(bind_host="10.0.0.9"), home)[0].bind_host == "10.0.0.9"
        for elsewhere in (AdminOptions(file_kv="/kv"), AdminOptions(discovery_backend="etcd")):
            assert deployment.find(elsewhere, home) == (elsewhere, None)
    assert folder == in_cache(home, "a")
    assert options == AdminOptions(
        namespace="n", file_kv=str(in_cache(home, "a").discovery), bind_host="127.0.0.1"
    )


def test_serve_in_another_namespace_is_looked_for_there(home: Mapping[str, str]) -> None:
    with in_cache(home, "a").opened():
        in_cache(home, "a").note("http://127.0.0.1:8123", {"namespace": "ours"})
        found, named = (
            deployment.find(given, home)[0] for given in (AdminOptions(), AdminOptions(namespace="n"))
        )
    assert (found.namespace, named.namespace) == ("ours", "n")


def test_serve_in_a_cluster_is_looked_for_there(home: Mapping[str, str]) -> None:
    noted: dict[str, Any] = {
        "discovery_backend": "etcd",
        "file_kv": "/unused",
        "etcd_endpoints": "http://10.0.0.1:2379",
        "request_plane": "nats",
        "nats_server": "nats://10.0.0.1:4222",
        "bind_host": None,
    }
    with in_cache(home, "a").opened():
        in_cache(home, "a").note("http://127.0.0.1:8123", noted)
        options, _ = deployment.find(AdminOptions(), home)
    assert options == AdminOptions(**noted)


def test_url_of_another_server_is_not_taken_for_the_only_serve(home: Mapping[str, str]) -> None:
    with in_cache(home, "a").opened():
        in_cache(home, "a").note("http://127.0.0.1:8123")
        for url in ("http://127.0.0.1:8124", "http://10.0.0.1:8123"):
            assert deployment.find(AdminOptions(), home, url) == (AdminOptions(), None)
        _, found = deployment.find(AdminOptions(), home, "http://localhost:8123")
        assert found == in_cache(home, "a")


def test_of_several_serves_one_must_be_named(home: Mapping[str, str]) -> None:
    first, second = in_cache(home, "a"), in_cache(home, "b")
    with first.opened(), second.opened():
        second.note("http://127.0.0.1:8123")
        with pytest.raises(ConfigError, match="several serve processes run") as refused:
            deployment.find(AdminOptions(), home)
        assert str(refused.value).splitlines()[1:] == [
            f"  {first.path}",
            f"  {second.path}  http://127.0.0.1:8123",
        ]
        assert deployment.find(AdminOptions(run_dir=str(first.path)), home)[1] == first
        assert deployment.find(AdminOptions(), home, "http://127.0.0.1:8123")[1] == second
        assert deployment.find(AdminOptions(), home, "http://127.0.0.1:9")[1] is None


def ended(home: Mapping[str, str], name: str, days_ago: float = 1) -> Path:
    """The folder that a serve left, killed or not."""
    folder = in_cache(home, name)
    with folder.opened():
        folder.logs.joinpath("worker-1.log").write_text("something")
    then = time.time() - days_ago * 86400
    os.utime(folder.path / "lock", (then, then))
    return folder.path


def test_old_run_folders_are_removed_and_never_one_in_use(home: Mapping[str, str], tmp_path: Path) -> None:
    paths = [ended(home, f"2026010{day}-120000-{day}") for day in range(1, 7)]
    young = ended(home, "20260101-110000-99", days_ago=0)
    others = [ended(home, "mine"), ended(home, "20260101-120000-x")]
    with RunFolder(paths[0]).opened(), run_folder.choose(str(tmp_path / "chosen"), home).opened():
        run_folder.prune(home, 2)
        assert [path.exists() for path in paths] == [True, False, False, False, True, True]
        assert young.exists() and all(path.exists() for path in others)
        assert (tmp_path / "chosen" / "logs").exists()
    run_folder.prune(home, 0)
    assert not any(path.exists() for path in paths[1:])
    run_folder.prune({"HOME": str(tmp_path / "none")}, 0)


def test_run_folder_where_nothing_runs_is_refused(home: Mapping[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no serve runs there"):
        deployment.find(AdminOptions(run_dir=str(tmp_path)), home)
