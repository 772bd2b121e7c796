"""Host memory of engines that ended before its name was taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_vllm import host_memory
from dynamo_vllm.config.rules import kv_tiers
from dynamo_vllm.errors import ConfigError

STARTING = """
import os, signal, sys
from pathlib import Path
from dynamo_vllm import host_memory
host_memory.FOLDER = Path(sys.argv[1])
with host_memory.new_engine_id() as name:
    for suffix in ("", "_dp1"):
        (host_memory.FOLDER / f"vllm_offload_{name}{suffix}.mmap").touch()
    print(name, flush=True)
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "FOLDER", tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def memory_of(folder: Path, name: str) -> Path:
    path = folder / f"vllm_offload_{name}.mmap"
    path.touch()
    return path


def killed(folder: Path) -> None:
    """Kills a worker while its engine starts."""
    process = subprocess.Popen([sys.executable, "-c", STARTING, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    before = names(folder)
    host_memory.sweep()
    assert names(folder) == before
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    assert names(folder) == before


def test_start_that_fails_leaves_nothing(folder: Path) -> None:
    with pytest.raises(RuntimeError), host_memory.new_engine_id() as name:
        memory_of(folder, name)
        memory_of(folder, f"{name}_dp1")
        raise RuntimeError("out of memory")
    assert names(folder) == []


def test_memory_of_a_killed_worker_goes_also_where_its_dying_engine_made_it_after_a_sweep(
    folder: Path,
) -> None:
    killed(folder)
    (memory,) = folder.glob("*_dp1.mmap")
    memory.unlink()
    host_memory.sweep()
    assert names(folder) == []
    memory.touch()
    host_memory.sweep()
    assert names(folder) == []


def test_what_is_in_use_or_of_others_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [folder / name for name in ("vllm_offload_5e7c.mmap", "dynamo-vllm-notes.lock", "sem.mp")]
    for path in theirs:
        path.touch()
    with host_memory.new_engine_id() as name:
        memory_of(folder, name)
        host_memory.sweep()
        assert len(names(folder)) == len(theirs) + 2
    dead = memory_of(folder, f"dynamo-vllm-{'0' * 32}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        host_memory.sweep()
        assert dead.exists()
    host_memory.sweep()
    assert names(folder) == sorted(path.name for path in theirs)


def test_what_a_killed_engine_left_is_not_counted_as_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "shared_memory_bytes", lambda: 0 if names(folder) else 64 * 10**9)
    killed(folder)
    kv_tiers.refuse_more_than_shared_memory(50, "--kv-offload-gb 50")
    with host_memory.new_engine_id(), pytest.raises(ConfigError, match="does not fit"):
        kv_tiers.refuse_more_than_shared_memory(50, "--kv-offload-gb 50")
