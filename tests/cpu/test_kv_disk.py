"""Tests KV caches on disk behind real engines: the same texts as without, whatever the disk does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dynamo_vllm.engine.machine import has_bfloat16
from dynamo_vllm.engine.tiers.disk_files import FOLDER
from dynamo_vllm.kv.model_identity import identity
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from harness.warm import Zygote

PROMPTS, CHUNKS = 12, 8
BLOCK_TOKENS, CHUNK_BYTES = 32, 128 * 1024
SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "40", "--block-size", str(BLOCK_TOKENS))
"""The engine has room for the blocks of four prompts, and host memory for as many."""
READ, FAILURES = "vllm:kv_offload_tiering_read_bytes_total", "vllm:kv_offload_disk_failures_total"
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
        body = {"model": "tiny", "prompt": prompt(number), "max_tokens": 16, "temperature": 0}
        done = self.made.post("/v1/completions", body | {"ignore_eos": True})
        assert done.status_code == 200, done.text
        return str(done.json()["choices"][0]["text"])

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
def cold(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the texts of an engine without tiers."""
    folder = tmp_path_factory.mktemp("cold")
    with stack(folder) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *SMALL)
        made.wait_ready(120)
        texts = Served(made, worker, folder).texts()
    assert len(set(texts)) == PROMPTS
    return texts


def started(made: Stack, warm: Zygote, model: Path, folder: Path, **more: str) -> Served:
    served = Served(made, warm.start_worker(made, model, *tiers(folder, model, **more)), folder)
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
    warm: Zygote, model: Path, tmp_path: Path, cold: list[str]
) -> None:
    disk, whole = tmp_path / "disk", PROMPTS * CHUNKS
    with stack(tmp_path) as made:
        made.start_frontend()
        served = started(made, warm, model, disk)
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
            texts = texts_beside(warm, other, disk, tmp_path / name, flags, count)
            if name != "dtype":  # rounding may change the texts, or not
                assert (texts == cold[:4]) is (name == "block size")
        end(served)
        again = started(made, warm, model, disk)
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


def texts_beside(
    warm: Zygote, model: Path, disk: Path, folder: Path, flags: dict[str, str], count: int
) -> list[str]:
    """Returns some texts of another model that has its files on the same disk; it must read none of them.

    It is the `count`th kind of engine there.
    """
    folder.mkdir()
    with stack(folder) as made:
        made.start_frontend()
        served = started(made, warm, model, disk, **flags)
        texts = [served.text(number) for number in range(4)]
        assert served.read_bytes() == 0
        until("it has its own", lambda: len(files_by_kind(served)) == count)
        end(served)
        return texts


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields a file system of its own where this user may make one, else a folder."""
    folder = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="module")
def faulty(
    warm: Zygote, model: Path, small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Yields a worker whose disk the tests below break one after the other."""
    with stack(tmp_path_factory.mktemp("faulty")) as made:
        made.start_frontend()
        served = started(made, warm, model, small_disk)
        served.wait_stored()
        yield served


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


@pytest.mark.more
def test_a_hanging_disk_delays_one_prompt(faulty: Served, cold: list[str]) -> None:
    faulty.wait_stored()
    pipes = faulty.files()
    for path in pipes:
        path.unlink()
        os.mkfifo(path)  # nobody writes: reading waits for ever
    assert faulty.texts() == cold
    assert faulty.worker.metric(PAUSED) == 1 and faulty.worker.metric(FAILURES, reason="slow") == 1
    assert len(faulty.lines("next try in")) == 1 and "took more than 5 s" in faulty.lines("next try in")[0]

    def released() -> bool:
        for path in pipes:
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        return bool(faulty.lines("it works again"))

    until("the disk works again", released)
    assert faulty.texts() == cold and faulty.worker.metric(PAUSED) == 0


def test_a_full_disk_only_stops_stores(faulty: Served, cold: list[str]) -> None:
    if not os.path.ismount(faulty.folder):
        pytest.skip("needs a file system of its own")
    faulty.wait_stored()
    with (faulty.folder / "others").open("wb") as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    for number in range(100, 106):
        faulty.text(number)
    assert faulty.worker.metric(PAUSED) == 1 and faulty.worker.metric(FAILURES, reason="full") >= 1
    before = faulty.read_bytes()
    assert faulty.texts() == cold and faulty.read_bytes() > before
    assert len(faulty.lines("the disk is full")) == 1


def test_a_folder_that_vanishes_costs_only_its_caches(faulty: Served, cold: list[str]) -> None:
    shutil.rmtree(faulty.folder / FOLDER)
    assert faulty.texts() == cold and faulty.worker.metric(FAILURES, reason="error") == 1
    assert faulty.texts() == cold and faulty.worker.is_ready()
    assert len(faulty.lines("No such file")) == 1
