"""Where adapters come from: folders, the store of downloads, and what no source takes."""

from __future__ import annotations

import asyncio
import builtins
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo_vllm.errors import AdapterRefused, BadCommand, SourceFailed
from dynamo_vllm.lora import sources
from dynamo_vllm.lora.base import Fetched
from dynamo_vllm.lora.files import AdapterFiles
from dynamo_vllm.lora.sources.base import SourceLimits, Stopped, check_names, digest
from dynamo_vllm.lora.sources.store import Store, cache_folder
from harness.adapters import make_adapter, write_safetensors
from harness.waiting import until_async

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def nothing(_done: int, _total: int | None) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter")


def write(folder: Path, config: bytes = b"{}", weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS).write_bytes(weights)
    return folder


async def fetch(uri: str, **limits: int) -> Fetched:
    return await sources.fetch(uri, Path("/nowhere"), SourceLimits(**limits), nothing)


# -- addresses -------------------------------------------------------------------------------------


async def test_address_that_names_nothing_says_what_would() -> None:
    odd = "http://host/x ://x relative/path owner/name file://host/folder file:///a%00b hf://name hf:///name"
    odd += " hf://owner/name/more hf://owner/name@ s3:// s3:///prefix s3://bucket/a/../b s3://bucket/a//b"
    for uri in ["", *odd.split()]:
        with pytest.raises(BadCommand, match="://"):
            await fetch(uri)
    known = "gs:// is unknown; give one of /folder, file:///folder, hf://.*s3://"
    with pytest.raises(BadCommand, match=known):
        await fetch("gs://bucket/x")


@pytest.mark.parametrize("uri", ["s3://bucket/adapter.zip", "s3://bucket/a.tar.gz/"])
async def test_archive_in_a_bucket_is_refused_unseen(uri: str) -> None:
    with pytest.raises(AdapterRefused, match="is an archive, which is not unpacked"):
        await fetch(uri)


async def test_without_boto3_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_boto3(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("boto"):
            raise ImportError(name)
        return imported(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without_boto3)
    with pytest.raises(SourceFailed, match=r"pip install 'dynamo-vllm\[s3\]'"):
        await fetch("s3://bucket/prefix")


# -- folders ---------------------------------------------------------------------------------------


async def test_folder_is_used_where_it_is(folder: Path) -> None:
    for uri in (str(folder), f"file://{folder}", f"file://localhost{folder}/", f"{folder}/."):
        fetched = await fetch(uri)
        assert (fetched.path, fetched.bytes) == (folder, 9)


async def test_path_with_odd_characters(tmp_path: Path) -> None:
    folder = write(tmp_path / "a ?#%20b")
    assert (await fetch(str(folder))).path == folder
    assert (await fetch(f"file://{tmp_path}/a%20%3F%23%2520b")).path == folder


async def test_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    one, same = write(tmp_path / "1"), write(tmp_path / "2")
    (same / "README.md").write_text("x")
    others = [
        write(tmp_path / "3", weights=b"weights2"),
        write(tmp_path / "4", config=b"{ }"),
        write(tmp_path / "5", config=b"{}w", weights=b"eights"),
    ]
    digests = [(await fetch(str(folder))).digest for folder in (one, same, *others)]
    assert digests[0] == digests[1] and len(set(digests)) == 4


async def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="No such file or directory; the path must exist on the worker's"):
        await fetch(str(tmp_path / "none"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SourceFailed):
        await fetch(str(tmp_path / "loop"))


async def test_file_instead_of_a_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=f"is a file; give the folder with {WEIGHTS}"):
        await fetch(str(folder / WEIGHTS))
    (tmp_path / "adapter.tar.gz").write_bytes(b"x")
    with pytest.raises(AdapterRefused, match="is an archive, which is not unpacked; give the folder"):
        await fetch(str(tmp_path / "adapter.tar.gz"))


async def test_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(secret)
    with pytest.raises(AdapterRefused, match=f"{CONFIG} is a link that leads out of the folder"):
        await fetch(str(folder))
    secret.unlink()
    with pytest.raises(AdapterRefused, match="is a link to nothing"):
        await fetch(str(folder))


async def test_links_that_stay_inside_pass(folder: Path, tmp_path: Path) -> None:
    """As a mounted volume has them; the folder itself may be reached through a link, too."""
    (folder / "..data").mkdir()
    (folder / WEIGHTS).rename(folder / "..data" / WEIGHTS)
    (folder / WEIGHTS).symlink_to(Path("..data", WEIGHTS))
    (tmp_path / "link").symlink_to(folder)
    assert (await fetch(str(tmp_path / "link"))).path == folder


async def test_snapshot_in_the_cache_of_the_hub_passes(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    blobs = write(repository / "blobs")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(Path("..", "..", "blobs", name))
    assert (await fetch(str(snapshot))).digest == digest(blobs)
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(write(tmp_path / "elsewhere") / CONFIG)
    with pytest.raises(AdapterRefused, match="leads out of the folder"):
        await fetch(str(snapshot))


async def test_only_regular_files(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterRefused, match=f"there is no {WEIGHTS}"):
        await fetch(str(folder))
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(AdapterRefused, match=f"{WEIGHTS} is not a regular file"):
        await fetch(str(folder))
    for file in (WEIGHTS, CONFIG):
        (folder / file).unlink()
    with pytest.raises(AdapterRefused, match=f"there is no {CONFIG}"):
        await fetch(str(folder))


async def test_size_limit(folder: Path) -> None:
    assert (await fetch(str(folder), max_bytes=9)).bytes == 9
    with pytest.raises(AdapterRefused, match="has 9 bytes, the limit is 8; raise --lora-max-gb"):
        await fetch(str(folder), max_bytes=8)
    (folder / CONFIG).write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(AdapterRefused, match="more than 1048576 bytes"):
        await fetch(str(folder))


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ((), SourceFailed, "it is empty or does not exist"),
        (("adapter.zip",), AdapterRefused, "but the archive adapter.zip; archives are not unpacked"),
        ((CONFIG, "x/" + WEIGHTS), AdapterRefused, f"there is no {WEIGHTS}"),
        ((WEIGHTS,), AdapterRefused, f"there is no {CONFIG}"),
        ((CONFIG, "adapter_model.pt"), AdapterRefused, "adapter_model.pt, which may contain code"),
    ],
)
def test_place_that_is_no_adapter(names: tuple[str, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_names(dict.fromkeys(names, 1), SourceLimits(), "s3://b/p")


async def test_fetch_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started, gone, ended = threading.Event(), threading.Event(), threading.Event()

    def endless(_uri: str, _cache: Path, _limits: SourceLimits, report: Any) -> Fetched:
        started.set()
        gone.wait(30)
        try:
            report(1, 2)
        except Stopped:
            ended.set()
            raise
        raise AssertionError("was not stopped")

    monkeypatch.setitem(sources.SOURCES, "s3", endless)
    task = asyncio.create_task(fetch("s3://bucket/prefix"))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gone.set()
    assert await asyncio.to_thread(ended.wait, 30)


# -- the store -------------------------------------------------------------------------------------

SIZES = {CONFIG: 2, WEIGHTS: 7}


def download(store: Store, name: str) -> Path:
    with store.part() as part:
        (part / CONFIG).write_bytes(b"{}")
        (part / WEIGHTS).write_bytes(b"weights")
        return store.keep(part, name, SIZES)


def test_kept_download_is_found_again_and_leaves_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    assert store.find("s3-1", SIZES) is None
    assert download(store, "s3-1") == store.find("s3-1", SIZES) == tmp_path / "cache" / "s3-1"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["s3-1"]
    assert sorted(path.name for path in (tmp_path / "cache" / "s3-1").iterdir()) == [CONFIG, WEIGHTS]


def test_download_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache")
    assert store.clean() == 0, "there is no folder yet"
    with pytest.raises(ConnectionError), store.part() as part:
        (part / CONFIG).write_bytes(b"{}")
        raise ConnectionError
    assert list((tmp_path / "cache").iterdir()) == []


KILLED = """
import os, pathlib, sys
from dynamo_vllm.lora.sources.store import Store
with Store(pathlib.Path(sys.argv[1])).part() as part:
    (part / "adapter_config.json").write_bytes(b"{")
    os._exit(0)  # as kill -9: nothing is tidied up
"""


def test_leftovers_of_a_killed_download_are_removed_and_live_ones_are_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=True)
    (left,) = tmp_path.glob(".part-*[!k]")
    assert (left / CONFIG).exists()
    with store.part() as alive:
        assert store.clean() == 1
        assert alive.exists() and not left.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "remove", "link"])
def test_touched_files_are_fetched_anew(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    weights = download(store, "s3-1") / WEIGHTS
    if damage == "truncate":
        weights.write_bytes(b"w")
    else:
        weights.rename(tmp_path / "moved")
    if damage == "link":
        weights.symlink_to(tmp_path / "moved")
    assert store.find("s3-1", SIZES) is None
    folder = download(store, "s3-1")
    assert store.find("s3-1", SIZES) == folder and not weights.is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_second_of_two_downloads_takes_the_first_ones_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.part() as part:
        (part / CONFIG).write_bytes(b"[]")
        (part / WEIGHTS).write_bytes(b"other_w")
        first = download(store, "s3-1")
        assert store.keep(part, "s3-1", SIZES) == first
    assert (first / WEIGHTS).read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == ["s3-1"]


def test_where_the_store_lies() -> None:
    assert cache_folder("/data/adapters", {}) == Path("/data/adapters")
    assert cache_folder(None, {"HOME": "/h"}) == Path("/h/.cache/dynamo-vllm/adapters")
    assert cache_folder(None, {"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/c/dynamo-vllm/adapters")


# -- both steps together ---------------------------------------------------------------------------


async def test_files_that_change_between_fetching_and_adding_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_safetensors(
        base / "model.safetensors", {"model.layers.0.q_proj.weight": np.zeros((8, 8), np.float32)}
    )
    folder = make_adapter(tmp_path / "a", base, targets=["q_proj"], rank=2)
    files = AdapterFiles(tmp_path / "cache", SourceLimits(), max_rank=16)
    await files.start(base, "tiny")
    fetched = await files.fetch("sql", str(folder), nothing)
    assert (await files.verify(fetched)).rank == 2
    make_adapter(folder, base, targets=["q_proj"], rank=2, seed=2)
    with pytest.raises(AdapterRefused, match="have changed meanwhile; load it again"):
        await files.verify(fetched)


async def test_start_removes_what_a_killed_download_left(tmp_path: Path) -> None:
    (tmp_path / ".part-1.lock").touch()
    write(tmp_path / ".part-1")
    await AdapterFiles(tmp_path, SourceLimits(), max_rank=16).start(None, "tiny")
    assert os.listdir(tmp_path) == []


def test_source_that_hangs_does_not_keep_the_process_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, told, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(*_: object) -> Fetched:
        started.set()
        told.wait(30)
        ended.set()
        raise SourceFailed("it was told to hang")

    async def life() -> None:
        files = AdapterFiles(tmp_path, SourceLimits(), 8)
        fetching = asyncio.create_task(files.fetch("a", "/a", lambda done, total: None))
        await until_async("the fetch", started.is_set)
        fetching.cancel()

    monkeypatch.setitem(sources.SOURCES, "", hang)
    asyncio.run(life())
    assert not ended.is_set()
    told.set()
