"""What is read from file discovery, in the form that runtime 1.6.1 writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.config.options import FindOptions
from dynamo_vllm.serving.watch.discovery import (
    Channel,
    Discovery,
    FileReader,
    Member,
    NotReadable,
    Seen,
    open_discovery,
)

SCOPE = {
    "kind": "endpoint",
    "endpoint": {"namespace": "dynamo", "component": "backend", "name": "generate"},
}


def write(folder: Path, table: str, name: str, value: Any) -> Path:
    path = folder / "v1" / table / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def channel(transport: dict[str, Any], number: int) -> dict[str, Any]:
    return {"scope": SCOPE, "topic": "kv-events", "instance_id": number, "transport": transport}


def instance(number: int, endpoint: str = "generate", namespace: str = "dynamo") -> dict[str, Any]:
    return {"namespace": namespace, "component": "backend", "endpoint": endpoint, "instance_id": number}


def card(number: int, name: str, **more: Any) -> dict[str, Any]:
    body = {"display_name": name, "kv_cache_block_size": 16, **more}
    return {"namespace": "dynamo", "instance_id": number, "card_json": body}


async def look(folder: Path) -> Seen:
    return await Discovery(FileReader(folder), "dynamo").look()


async def test_workers_and_channels_are_found(tmp_path: Path) -> None:
    zmq = {"kind": "Zmq", "config": {"endpoint": "tcp://127.0.0.1:1"}}
    write(tmp_path, "event_channels", "a", channel(zmq, 7))
    write(tmp_path, "event_channels", "b", channel({"kind": "Nats", "config": {}}, 8))
    metadata = {"worker": {"worker_id": 5, "dp_rank": 1}}
    write(tmp_path, "event_sources", "a", {"scope": SCOPE, "publisher_id": 7, "metadata": metadata})
    write(tmp_path, "instances", "a", instance(5))
    write(tmp_path, "instances", "b", instance(5, "load_lora"))
    write(tmp_path, "instances", "c", instance(6, namespace="other"))
    write(tmp_path, "mdc", "a", card(5, "model"))
    write(tmp_path, "mdc", "b", card(5, "adapter", lora={"name": "adapter"}))
    seen = await look(tmp_path)
    assert seen.channels == {
        Channel("kv-events", 7, "backend", "tcp://127.0.0.1:1"),
        Channel("kv-events", 8, "backend", None),
    }
    assert seen.sources == {7: (5, 1)}
    assert seen.members == {5: Member(5, "backend", ("model",), ("adapter",), 16)}


async def test_unfinished_and_foreign_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "instances", ".tmp_1", instance(5))
    write(tmp_path, "instances", "b", "{")
    write(tmp_path, "instances", "c", {"other": 1})
    assert (await look(tmp_path)).members == {}


async def test_files_that_come_and_go_are_noticed(tmp_path: Path) -> None:
    discovery = Discovery(FileReader(tmp_path), "dynamo")
    assert (await discovery.look()).members == {}
    path = write(tmp_path, "instances", "a", instance(5))
    assert set((await discovery.look()).members) == {5}
    fresh = write(tmp_path, "instances", ".tmp_a", instance(6))
    fresh.rename(path)
    assert set((await discovery.look()).members) == {6}
    path.unlink()
    assert (await discovery.look()).members == {}


async def test_nothing_is_made_again_while_nothing_changes(tmp_path: Path) -> None:
    path = write(tmp_path, "instances", "a", instance(5))
    os.utime(path.parent, (5, 5))
    discovery = Discovery(FileReader(tmp_path), "dynamo")
    first = await discovery.look()
    os.utime(path)
    assert await discovery.look() is first
    write(tmp_path, "mdc", "a", card(5, "model"))
    assert (await discovery.look()).members[5].models == ("model",)


def test_discovery_of_kubernetes_is_not_read() -> None:
    with pytest.raises(NotReadable, match="kubernetes"):
        open_discovery(FindOptions(discovery_backend="kubernetes"), None)
