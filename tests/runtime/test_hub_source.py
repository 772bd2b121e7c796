"""Adapters from a hub: the real huggingface_hub against a hub of one repository on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from dynamo_vllm.errors import AdapterRefused, SourceFailed
from dynamo_vllm.lora import sources
from dynamo_vllm.lora.base import Fetched
from dynamo_vllm.lora.sources.base import SourceLimits, Stopped
from harness.hub import Hub, hub, point_at, use_hub
from harness.processes import free_port
from harness.stack import environment

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b"{}", WEIGHTS: b"weights!" * 100_000, "README.md": b"x", "tokenizer.json": b"x"}
TOTAL = len(FILES[CONFIG]) + len(FILES[WEIGHTS])


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub("team/sql", dict(FILES)) as (made, address):
        use_hub(monkeypatch, address, tmp_path / "hub")
        yield made


def ignore(_done: int, _total: int | None) -> None:
    pass


async def fetch(address: str = "team/sql", on_progress: Any = ignore, **limits: int) -> Fetched:
    return await sources.fetch(f"hf://{address}", Path("/nowhere"), SourceLimits(**limits), on_progress)


async def test_adapter_comes_into_the_cache_of_the_hub(remote: Hub, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    fetched = await fetch(on_progress=lambda done, total: seen.append((done, total)))
    assert fetched.path == tmp_path / "hub/models--team--sql/snapshots" / remote.commit
    assert sorted(os.listdir(fetched.path)) == [CONFIG, WEIGHTS]
    assert fetched.bytes == TOTAL and (fetched.path / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert {total for _, total in seen} == {TOTAL} and seen[-1][0] == TOTAL
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


AS_IN_A_WORKER = """
import asyncio, os, sys
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.lora import sources
from dynamo_vllm.lora.sources.base import SourceLimits

vllm_environment.set_environment(EngineSettings(model=sys.argv[1], environment=dict(os.environ)))
print(asyncio.run(sources.fetch("hf://team/sql", None, SourceLimits(), lambda *_: None)).path)
"""


@pytest.mark.parametrize("offline", [False, True])
def test_worker_of_a_local_model_asks_the_hub_unless_the_user_forbids_it(
    model: Path, tmp_path: Path, offline: bool
) -> None:
    """In a process of its own: what the engine's start sets counts when the library is imported."""
    with hub("team/sql", dict(FILES)) as (made, address):
        env = environment(tmp_path, HF_ENDPOINT=address, HF_HOME=str(tmp_path), HF_HUB_DISABLE_XET="1")
        command = [sys.executable, "-c", AS_IN_A_WORKER, str(model)]
        env |= {"HF_HUB_OFFLINE": "1"} if offline else {}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    if offline:
        assert "the hub does not answer (OfflineModeIsEnabled)" in done.stderr and not made.downloads
    else:
        assert done.stdout.strip().endswith(made.commit), done.stderr


async def test_second_fetch_downloads_nothing_and_a_new_commit_does(remote: Hub) -> None:
    first = await fetch()
    assert await fetch() == await fetch(f"team/sql@{remote.commit}") == await fetch("team/sql@main") == first
    assert sorted(remote.downloads) == [CONFIG, WEIGHTS]
    remote.files[WEIGHTS] = b"other"
    second = await fetch()
    assert second.path != first.path and second.digest != first.digest


async def test_cache_serves_when_the_hub_is_away(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await fetch()
    with monkeypatch.context() as away:
        point_at(away, f"http://127.0.0.1:{free_port()}")
        assert await fetch() == await fetch(f"team/sql@{remote.commit}") == first
        with pytest.raises(SourceFailed, match=r"the hub does not answer \(ConnectError\), and the cache"):
            await fetch("team/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert await fetch() == first
    with pytest.raises(SourceFailed, match=r"\(OfflineModeIsEnabled\), and the cache does not have it"):
        await fetch("team/other")


async def test_new_version_that_comes_half_leaves_the_old_one_in_the_cache(
    remote: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await fetch()
    remote.files[WEIGHTS] = b"other"
    del remote.files["README.md"]

    def go_away(_done: int, _total: int | None) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        await fetch(on_progress=go_away)
    point_at(monkeypatch, f"http://127.0.0.1:{free_port()}")
    assert await fetch() == first


async def test_what_the_hub_refuses(remote: Hub) -> None:
    with pytest.raises(SourceFailed, match="there is no such repository, or HF_TOKEN may not read it"):
        await fetch("team/none")
    with pytest.raises(SourceFailed, match="the repository has no revision v9"):
        await fetch("team/sql@v9")
    remote.is_gated = True
    with pytest.raises(SourceFailed, match="the repository is gated"):
        await fetch()


async def test_repository_that_is_no_adapter_or_too_large(remote: Hub) -> None:
    with pytest.raises(AdapterRefused, match=f"has {TOTAL} bytes, the limit is {TOTAL - 1}"):
        await fetch(max_bytes=TOTAL - 1)
    remote.files["adapter_model.bin"] = remote.files.pop(WEIGHTS)
    with pytest.raises(AdapterRefused, match="adapter_model.bin, which may contain code"):
        await fetch()
    assert remote.downloads == []


async def test_download_that_breaks_off_is_told_and_gone_on_with(
    remote: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    remote.cut_after = 0
    with pytest.raises(SourceFailed, match=r"the download broke off \(RemoteProtocolError\); load it again"):
        await fetch()
    remote.cut_after = None
    assert (await fetch()).bytes == TOTAL


async def test_download_that_nobody_waits_for_stops(remote: Hub) -> None:
    def stop(done: int, _total: int | None) -> None:
        if done > len(FILES[CONFIG]):
            raise Stopped

    with pytest.raises(Stopped):
        await fetch(on_progress=stop)
    assert (await fetch()).bytes == TOTAL
