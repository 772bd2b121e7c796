"""Models by hub id: the real huggingface_hub against a hub of one repository on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.worker_plan import WorkerPlan
from dynamo_vllm.errors import StartError
from dynamo_vllm.serving import factories
from dynamo_vllm.serving.lifecycle.progress import Progress
from harness.hub import Hub, commit_of, hub, point_at, use_hub
from harness.processes import free_port
from harness.stack import Stack, stack

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
FILES = {CONFIG: b"{}", TOKENIZER: b"[]", WEIGHTS: b"new", "README.md": b"r", "original/x.pth": b"x"}
OLD = {**FILES, WEIGHTS: b"old"}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub("team/chat", dict(FILES)) as (made, address):
        made.tags["v1"] = dict(OLD)
        use_hub(monkeypatch, address, tmp_path / "hub")
        yield made


async def fetch(*flags: str, model: str = "team/chat") -> Path:
    made = await factories.with_local_model(
        WorkerPlan.of(WorkerOptions(model=model), flags), {}, Progress(None)
    )
    assert made.served_model_name == (model,)
    return Path(str(made.model))


async def test_what_vllm_reads_comes_into_the_cache_of_the_hub(remote: Hub, tmp_path: Path) -> None:
    folder = await fetch()
    assert folder == tmp_path / "hub/models--team--chat/snapshots" / remote.commit
    assert sorted(os.listdir(folder)) == [CONFIG, WEIGHTS, TOKENIZER]
    assert remote.downloads[-1] == WEIGHTS
    assert await fetch() == folder and len(remote.downloads) == 3


async def test_revision_folder_and_token_are_those_of_the_flags(remote: Hub, tmp_path: Path) -> None:
    old = tmp_path / "there" / "models--team--chat/snapshots" / commit_of(OLD)
    flags = ("--revision", "v1", f"--download-dir={tmp_path / 'there'}", "--hf-token", "mine")
    assert await fetch(*flags) == old
    assert (old / WEIGHTS).read_bytes() == b"old"
    assert not (tmp_path / "hub").exists()
    assert remote.tokens == {"Bearer mine"}
    with pytest.raises(StartError, match="--model team/chat has no --revision v9"):
        await fetch("--revision", "v9")


async def test_cache_serves_when_the_hub_does_not(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    main, old = await fetch(), await fetch("--revision", "v1")
    remote.is_gated = True
    assert await fetch() == main
    point_at(monkeypatch, f"http://127.0.0.1:{free_port()}")
    assert await fetch() == main and await fetch("--revision", "v1") == old
    (old / WEIGHTS).unlink()
    with pytest.raises(StartError, match=r"\(ConnectError\), and the cache does not have all of it"):
        await fetch("--revision", "v1")
    assert await fetch("--revision", "v1", "--load-format", "dummy") == old
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert await fetch() == main


async def test_shards_that_are_not_all_in_the_cache_are_not_served(
    remote: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    del remote.files[WEIGHTS]
    shards = {f"model-{n}-of-2.safetensors": bytes([n]) for n in (1, 2)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})}
    remote.files |= {
        **shards,
        **{name: text.encode() for name, text in index.items()},
        "spare.safetensors": b"s",
    }
    folder = await fetch()
    assert set(remote.downloads) == {CONFIG, TOKENIZER, *index, *shards}
    point_at(monkeypatch, f"http://127.0.0.1:{free_port()}")
    assert await fetch() == folder
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(StartError, match="does not have all of it"):
        await fetch()


async def test_what_the_hub_refuses(remote: Hub) -> None:
    with pytest.raises(StartError, match="has none of this name, or HF_TOKEN may not read it"):
        await fetch(model="team/none")
    with pytest.raises(StartError, match="is neither a folder nor a hub id"):
        await fetch(model="team/a chat")
    remote.is_gated = True
    with pytest.raises(StartError, match="it is gated.*set HF_TOKEN"):
        await fetch()


def test_worker_by_hub_id_is_served_under_it(model: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with hub("team/chat", files) as (_, address), stack(tmp_path) as made:
        made.start_frontend()
        made.start_worker(
            *("--model", "team/chat", "--engine", "fake"),
            env={"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"},
        )
        made.wait_ready()
        assert made.models() == ["team/chat"]
        assert answer(made) == 200
        assert (tmp_path / "home/hub/models--team--chat").is_dir()


def test_signal_while_a_model_is_fetched_ends_the_worker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as slow, stack(tmp_path) as made:
        address = f"http://127.0.0.1:{slow.getsockname()[1]}"
        worker = made.start_worker("--model", "team/chat", "--engine", "fake", env={"HF_ENDPOINT": address})
        connection, _ = slow.accept()
        with ThreadPoolExecutor(1) as pool, connection:
            pool.submit(never_ends, connection)
            worker.signal(signal.SIGTERM)
            assert worker.process.wait(60) == 128 + signal.SIGTERM


def never_ends(connection: socket.socket) -> None:
    """An answer that comes byte by byte, so that no limit of time ends it; until the other side is gone."""
    with contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            connection.sendall(b"x")
            time.sleep(0.2)


def answer(made: Stack) -> int:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "team/chat", "messages": messages, "max_tokens": 3}
    return made.post("/v1/chat/completions", body).status_code
