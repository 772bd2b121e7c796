"""Folders and files that nobody else may have made or may read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dynamo_vllm.config import private, runtime_env
from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.supervise.run_folder import RunFolder

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def open_to_all() -> object:
    """What is made without a thought is for everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def discovery() -> Path:
    found = FrontendOptions().discovery_folder
    assert found is not None
    return found


def test_discovery_is_in_a_folder_of_this_user(temporary: Path, open_to_all: object) -> None:
    runtime_env.make_discovery_folder(FrontendOptions())
    assert discovery().parent == temporary and str(os.getuid()) in discovery().name
    assert mode(discovery()) == 0o700
    assert runtime_env.reach(FrontendOptions())["DYN_FILE_KV"] == str(discovery())


@pytest.mark.parametrize("planted", ["folder for all", "link", pytest.param("another's", marks=as_root)])
def test_discovery_that_another_user_could_have_written_is_refused(temporary: Path, planted: str) -> None:
    if planted == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        discovery().symlink_to(temporary / "elsewhere")
    else:
        discovery().mkdir(mode=0o700)
        if planted == "another's":
            os.chown(discovery(), NOBODY, NOBODY)
        else:
            discovery().chmod(0o777)
    with pytest.raises(ConfigError, match="may belong to another user; .* with --file-kv"):
        runtime_env.make_discovery_folder(FrontendOptions())


def test_named_folder_is_the_users_to_share(tmp_path: Path, open_to_all: object) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    runtime_env.make_discovery_folder(FrontendOptions(file_kv=str(shared)))
    assert mode(shared) == 0o777
    runtime_env.make_discovery_folder(FrontendOptions(file_kv=str(tmp_path / "a" / "b")))
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_what_serve_keeps_is_for_its_user_only(tmp_path: Path, open_to_all: object) -> None:
    folder = RunFolder(tmp_path / "cache" / "run")
    with folder.opened():
        folder.note("http://127.0.0.1:8000", {"nats_server": "nats://user:hush@example.org"})
        made = [tmp_path / "cache", folder.path, folder.logs, folder.discovery]
        assert [mode(path) for path in made] == [0o700] * 4
        assert mode(folder.path / "serve.json") == 0o600
        assert folder.reach == {"nats_server": "nats://user:hush@example.org"}


def test_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "note").symlink_to(precious)
    with pytest.raises(OSError):
        private.open_file(tmp_path / "note", os.O_RDWR)
    private.write(tmp_path / "note", "told")
    assert (precious.read_text(), (tmp_path / "note").read_text()) == ("mine", "told")


def test_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    """Read in a process that can be ended: it would wait for somebody who writes."""
    for name in ("lock", "serve.json"):
        os.mkfifo(tmp_path / name)
    read = "import pathlib, sys; from dynamo_vllm.supervise.run_folder import RunFolder"
    code = f"{read}; folder = RunFolder(pathlib.Path(sys.argv[1])); print(folder.is_held, folder.url)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60, capture_output=True, text=True)
    assert done.stdout == "False None\n", done.stderr


@as_root
def test_file_of_another_user_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    os.chown(tmp_path / "lock", NOBODY, NOBODY)
    with pytest.raises(PermissionError):
        private.open_file(tmp_path / "lock", os.O_RDONLY)
