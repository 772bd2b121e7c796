"""Where caches go, with a home folder, with one that can only be read, and without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_vllm.config import folders
from dynamo_vllm.errors import ConfigError, StartError

SPARE = f"dynamo-vllm-home-{os.getuid()}"


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that the account file does not know."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder that cannot be written to, also by root."""
    home = tmp_path / "home"
    home.mkdir()
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != home and access(path, mode))
    yield home


def test_data_is_kept_in_the_users_folder_for_it(tmp_path: Path, read_only: Path) -> None:
    assert folders.data({"XDG_DATA_HOME": "/d", "HOME": "/h"}) == Path("/d/dynamo-vllm")
    assert folders.data({"HOME": str(tmp_path)}) == tmp_path / ".local/share/dynamo-vllm"
    without = {"HOME": str(read_only), "TMPDIR": str(tmp_path)}
    assert folders.data(without) == tmp_path / SPARE / ".local/share/dynamo-vllm"


def test_home_that_can_be_written_to_is_left_alone(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    assert folders.cache(environment) == tmp_path / ".cache"
    assert folders.for_worker(environment) == folders.for_frontend(environment) == {}


def test_user_without_a_home_gets_one_of_its_own(tmp_path: Path, nameless: None) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    expected = {"HOME": str(tmp_path / SPARE)}
    assert folders.for_worker(environment) == folders.for_frontend(environment) == expected
    assert (tmp_path / SPARE).stat().st_mode & 0o777 == 0o700
    assert folders.cache(environment) == tmp_path / SPARE / ".cache", "where other commands look for a serve"


def test_user_that_only_was_not_told_its_home_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "home", lambda environment: tmp_path)
    assert folders.for_frontend({}) == {"HOME": str(tmp_path)}


def test_home_that_can_only_be_read_stays_and_caches_go_elsewhere(tmp_path: Path, read_only: Path) -> None:
    (read_only / ".cache" / "huggingface").mkdir(parents=True)
    environment = {"HOME": str(read_only), "TMPDIR": str(tmp_path), "TRITON_HOME": "/mine"}
    found = folders.for_worker(environment)
    assert "HOME" not in found and "TRITON_HOME" not in found, "what the user set stands"
    assert found["XDG_CACHE_HOME"] == str(tmp_path / SPARE / ".cache") == str(folders.cache(environment))
    assert found["HF_HOME"] == str(read_only / ".cache" / "huggingface"), "models that are there are found"
    assert folders.for_frontend(environment)["HOME"] == str(tmp_path / SPARE), "it gets another home"


def test_folder_named_for_caches_is_used_for_all(tmp_path: Path, nameless: None) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert folders.for_worker(environment) == {"HOME": str(tmp_path / "cache" / "dynamo-vllm" / "home")}


@pytest.mark.parametrize("trap", ["link", "open to all"])
def test_folder_that_somebody_else_may_have_made_is_refused(
    trap: str, tmp_path: Path, nameless: None
) -> None:
    if trap == "link":
        (tmp_path / SPARE).symlink_to(tmp_path)
    else:
        (tmp_path / SPARE).mkdir()
        (tmp_path / SPARE).chmod(0o777)
    for ask in (folders.cache, folders.for_worker):
        with pytest.raises(ConfigError, match=f"{SPARE} may belong to another user; set HOME"):
            ask({"TMPDIR": str(tmp_path)})


def test_nowhere_to_write_is_said(tmp_path: Path, nameless: None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created .*; set HOME to a folder"):
        folders.for_worker({"TMPDIR": str(tmp_path / "file")})
    with pytest.raises(StartError, match=r"file/\.cache cannot be created: Not a directory; set HOME"):
        folders.frontend_cache({"HOME": str(tmp_path / "file")})


def test_full_disk_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.refuse_full_disk(tmp_path, "set HOME")
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: os.fdopen(full, "wb", 0))
    with pytest.raises(StartError, match="No space left on device; free disk space there, or set HOME"):
        folders.refuse_full_disk(tmp_path, "set HOME")
