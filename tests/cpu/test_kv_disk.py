"""Tests KV caches on disk behind real engines: the same texts as without, whatever the disk does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cpu.completions import complete
from cpu.stacks import Start
from cpu.test_tiers import BLOCK_TOKENS, READ
from dynamo_vllm.engine.machine import has_bfloat16
from dynamo_vllm.engine.tiers.disk_files import FOLDER
from dynamo_vllm.kv.model_identity import identity
from harness.stack import Stack, Worker
from harness.waiting import until

PROMPTS, CHUNKS, CHUNK_BYTES = 12, 8, 128 * 1024
SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "40", "--block-size", str(BLOCK_TOKENS))
"""The engine has room for the blocks of four prompts, and host memory for as many."""
FAILURES = "vllm:kv_offload_disk_failures_total"
PAUSED, STORED = "vllm:kv_offload_disk_paused", "vllm:kv_offload_disk_chunks"


def tiers(folder: Path, model: Path, **more: str) -> tuple[str, ...]:
    """Returns the flags of a worker with a small tier in host memory and one on disk."""
    tier = {
        "type": "DiskTier",
        "module_path": "dynamo_vllm.engine.tiers.disk_tier",
        "folder": str(folder),
        "limit_bytes": 64 << 20,
        "identity": identity(str(model), more, {}),
    }
    extra = {
        "spec_name": "Tiers",
        "spec_module_path": "dynamo_vllm.engine.tiers.spec",
        "cpu_bytes_to_use": 4 * CHUNKS * CHUNK_BYTES,
        "self_describing_kv_events": True,
        "secondary_tiers": [tier],
    }
    config = {
        "kv_connector": "TierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    given = [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", value)]
    return (*SMALL, "--kv-transfer-config", json.dumps(config), *given)


def prompt(number: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(10, 900) for _ in range(CHUNKS * BLOCK_TOKENS + 5)]


@dataclass
class Served:
    """A frontend and a worker with tiers, and the disk's folder."""

    made: Stack
    worker: Worker
    folder: Path

    def text(self, number: int) -> str:
        return complete(self.made, prompt(number), 16).text

    def texts(self) -> list[str]:
        return [self.text(number) for number in range(PROMPTS)]

    def read_bytes(self) -> float:
        return self.worker.metric(READ, tier="1:DiskTier")

    def files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{FOLDER}/*/*/*/??/*"))

    def wait_stored(self) -> None:
        self.texts()
        until("all is stored", lambda: len(self.files()) == PROMPTS * CHUNKS)

    def lines(self, words: str) -> list[str]:
        return [line for line in self.worker.log.read_text().splitlines() if words in line]


@pytest.fixture(scope="module")
def cold(one_worker: Stack) -> list[str]:
    """Returns the texts of an engine without tiers."""
    texts = [complete(one_worker, prompt(number), 16).text for number in range(PROMPTS)]
    assert len(set(texts)) == PROMPTS
    return texts


def started(start: Start, made: Stack, folder: Path, model: Path | None = None, **more: str) -> Served:
    model = model or start.model
    served = Served(made, start.warm.start_worker(made, model, *tiers(folder, model, **more)), folder)
    made.wait_ready(120)
    return served


def end(served: Served) -> None:
    """Kills a worker with all its processes, and forgets it."""
    root = psutil.Process(served.worker.pid)
    below = [root, *root.children(recursive=True)]
    os.killpg(served.worker.pid, signal.SIGKILL)
    served.worker.process.wait(60)
    until("its processes have ended", lambda: not any(one.is_running() for one in below))
    served.made.workers.remove(served.worker)
    until("the worker is forgotten", lambda: not served.made.instances())


def other_weights(model: Path, folder: Path) -> Path:
    """Returns a model of the same shapes, with other values."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    for place in range(first + 3, len(data), 20):
        data[place] ^= 0x80
    path.write_bytes(data)
    return folder


@pytest.mark.more
def test_texts_are_the_same_from_disk_beside_other_models_and_after_a_kill(
    start: Start, model: Path, tmp_path: Path, cold: list[str]
) -> None:
    disk, whole = tmp_path / "disk", PROMPTS * CHUNKS
    served = started(start, start.frontend(), disk)
    assert served.texts() == cold and served.read_bytes() == 0
    until("all is stored", lambda: len(served.files()) == whole)
    assert served.texts() == cold and served.read_bytes() == whole * CHUNK_BYTES
    (own,) = files_by_kind(served)
    # Its files stay, and nobody else may take them for their own.
    kinds: dict[str, tuple[Path, dict[str, str]]] = {
        "weights": (other_weights(model, tmp_path / "model"), {}),
        "block size": (model, {"block_size": "64"}),
    }
    if has_bfloat16():
        kinds["dtype"] = (model, {"dtype": "bfloat16"})
    for count, (name, (other, flags)) in enumerate(kinds.items(), 2):
        texts = texts_beside(start, other, disk, flags, count)
        if name != "dtype":  # rounding may change the texts, or not
            assert (texts == cold[:4]) is (name == "block size")
    end(served)
    again = started(start, served.made, disk)
    assert again.texts() == cold and again.read_bytes() == whole * CHUNK_BYTES
    assert again.worker.metric(STORED) == whole == len(files_by_kind(again)[own])
    # Workers of the other kinds may be about to start again too.
    assert len(files_by_kind(again)) == 1 + len(kinds)


def files_by_kind(served: Served) -> dict[Path, list[Path]]:
    """Returns the files on disk by the fingerprints of their engines."""
    found: dict[Path, list[Path]] = {}
    for path in served.files():
        found.setdefault(path.parents[3], []).append(path)
    return found


def texts_beside(start: Start, model: Path, disk: Path, flags: dict[str, str], count: int) -> list[str]:
    """Returns some texts of another model that has its files on the same disk; it must read none of them.

    It is the `count`th kind of engine there.
    """
    served = started(start, start.frontend(), disk, model, **flags)
    texts = [served.text(number) for number in range(4)]
    assert served.read_bytes() == 0
    until("it has its own", lambda: len(files_by_kind(served)) == count)
    end(served)
    return texts


@pytest.fixture(scope="module")
def faulty(start_module: Start, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """`tests/unit/engine/tiers` has disks that are full, hang, or vanish."""
    served = started(start_module, start_module.frontend(), tmp_path_factory.mktemp("disk"))
    served.wait_stored()
    return served


def test_many_at_once_get_the_same_texts(faulty: Served, cold: list[str]) -> None:
    """They want more blocks from disk than host memory has room for."""
    numbers = [number for _ in range(3) for number in range(PROMPTS)]
    with ThreadPoolExecutor(PROMPTS) as threads:
        texts = list(threads.map(faulty.text, numbers))
    assert texts == [cold[number] for number in numbers]


def test_damaged_files_are_computed(faulty: Served, cold: list[str]) -> None:
    before = faulty.worker.metric(FAILURES, reason="damaged")
    for path in faulty.files()[::5]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert faulty.texts() == cold
    assert faulty.worker.metric(FAILURES, reason="damaged") > before
    assert len(faulty.lines("is useless")) == 1 and faulty.worker.metric(PAUSED) == 0
