"""Older spellings start the same worker as newer ones; upstream's endpoints answer on the request plane."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import upstream_map
from harness.adapters import make_adapter
from harness.plane import Plane, plane
from harness.processes import free_port
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake

pytestmark = pytest.mark.more

SPELLED = {"is_prefill_worker", "is_decode_worker", "disaggregation_mode", "dump_config_to", "system_port"}
SPELLED |= {"multimodal_worker", "route_to_encoder", "vllm_native_encoder_worker"}
SPELLED |= {f"multimodal_{role}_worker" for role in ("encode", "decode", "encode_prefill")}
"""Options that say how the role was spelled, or where this one worker writes and listens."""
SEES = "--enable-multimodal"
MEDIA = (SEES, "--ec-storage-path", "{folder}/embeddings")
PORT = str(free_port())
Words = tuple[tuple[str, ...], dict[str, str]]


def mode(role: str, *more: str) -> Words:
    return ("--disaggregation-mode", role, *more), {}


CASES: dict[str, tuple[Words, Words]] = {
    "--is-prefill-worker": ((("--is-prefill-worker",), {}), mode("prefill", "--connector", "nixl")),
    "DYN_VLLM_DISAGGREGATION_MODE": (((), {"DYN_VLLM_DISAGGREGATION_MODE": "decode"}), mode("decode")),
    "--disaggregation-mode pd": (mode("pd"), mode("agg")),
    "--multimodal-worker": (((*MEDIA, "--multimodal-worker"), {}), ((*MEDIA, "--route-to-encoder"), {})),
    "--multimodal-encode-worker": (((*MEDIA, "--multimodal-encode-worker"), {}), mode("encode", *MEDIA)),
    "--store-kv": ((("--store-kv", "file"), {}), (("--discovery-backend", "file"), {})),
    "--enable-local-indexer": ((("--enable-local-indexer",), {}), ((), {"DYN_LOCAL_INDEXER": "1"})),
    "DYN_LORA_ENABLED": (
        ((), {"DYN_LORA_ENABLED": "true", "DYN_LORA_PATH": "{folder}/adapters"}),
        (("--lora-enabled", "--lora-path", "{folder}/adapters"), {}),
    ),
    "VLLM_NIXL_SIDE_CHANNEL_HOST": (
        (("--is-prefill-worker",), {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}),
        mode("prefill", "--side-channel-host", "127.0.0.1"),
    ),
    "DYN_VLLM_KV_EVENT_PORT": (((), {"DYN_VLLM_KV_EVENT_PORT": PORT}), (("--kv-event-port", PORT), {})),
}


@pytest.mark.parametrize("name", CASES)
def test_older_spelling_starts_the_same_worker(name: str, model: Path, tmp_path: Path) -> None:
    older, newer = (started(words, model, tmp_path / str(n), tmp_path) for n, words in enumerate(CASES[name]))
    assert older == newer
    if name == "--is-prefill-worker":
        assert older["options"]["connector"] == ["nixl"] and "dynamo.prefill.generate" in older["served"]


def started(words: Words, model: Path, folder: Path, shared: Path) -> dict[str, Any]:
    """What a worker resolved and registered, without what differs with every start."""
    flags, env = words
    argv = [flag.format(folder=shared) for flag in flags]
    variables = {name: value.format(folder=shared) for name, value in env.items()}
    folder.mkdir()
    with stack(folder) as made:
        dump = folder / "dump.json"
        worker = made.start_worker(*fake(model), *argv, "--dump-config-to", str(dump), env=variables)
        until("ready", lambda: made._is_ready(worker))
        options = json.loads(dump.read_text())["options"]
        role = worker.admin("status").json()["role"]
        registered = sorted(registrations(folder / "discovery"), key=json.dumps)
    for name in (*SPELLED, "file_kv", "card_port"):
        options.pop(name, None)
    served = [f"{card['namespace']}.{card['component']}.{card['endpoint']}" for card in registered]
    return {"options": options, "role": role, "registered": registered, "served": served}


def registrations(discovery: Path) -> Iterator[dict[str, Any]]:
    """Endpoints and the model's card in file discovery; ids, addresses and paths are of one start."""
    for kind in ("instances", "mdc"):
        for path in discovery.glob(f"v1/{kind}/*"):  # an encode worker has no card
            yield without_start(json.loads(path.read_text()))


def without_start(value: Any) -> Any:
    if isinstance(value, dict):
        of_one_start = ("instance_id", "transport", "path", "checksum", "mdcsum")
        return {key: without_start(part) for key, part in value.items() if key not in of_one_start}
    return [without_start(part) for part in value] if isinstance(value, list) else value


# --- endpoints of upstream's workers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("named")) as made:
        made.start_frontend()
        made.start_worker(*fake(model, adapters=2), env={"DYN_LORA_ENABLED": "1"})
        yield made.wait_ready()


def called(over: Plane, endpoint: str, request: dict[str, Any]) -> dict[str, Any]:
    answer = over.call(f"backend.{endpoint}", request)
    (chunk,) = answer["chunks"]
    return dict(chunk)


def test_named_endpoints_answer_on_the_request_plane(
    with_adapters: Stack, model: Path, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "adapter", model)
    with plane(with_adapters.environment()) as over:
        request = {"lora_name": "sql", "source": {"uri": f"file://{folder}"}}
        loaded = called(over, "load_lora", request)
        assert (loaded["status"], loaded["lora_name"], loaded["already_loaded"]) == ("success", "sql", False)
        assert called(over, "load_lora", request)["already_loaded"] is True
        until("the adapter", lambda: "sql" in with_adapters.models())
        found = called(over, "list_loras", {})
        assert (found["status"], found["count"]) == ("success", 1)
        assert [(lora["name"], lora["id"]) for lora in found["loras"]] == [("sql", loaded["lora_id"])]
        assert called(over, "clear_kv_blocks", {}) == {"status": "success", "kinds": ["prefix"]}
        assert called(over, "unload_lora", {"lora_name": "sql"})["status"] == "success"
        assert called(over, "list_loras", {})["count"] == 0
        until("no adapter", lambda: "sql" not in with_adapters.models())
        again = called(over, "unload_lora", {"lora_name": "sql"})
        assert (again["status"], again["code"]) == ("error", 404)


def test_control_routes_of_upstream_are_verbs(with_adapters: Stack) -> None:
    (worker,) = with_adapters.workers
    for verb, state in (("sleep", "asleep"), ("wake_up", "ready")):
        reply = httpx.post(f"{worker.system_url}/engine/control/{verb}", json={}, timeout=60)
        assert (reply.status_code, reply.json()["status"]) == (200, "success")
        assert worker.admin("status").json()["state"] == state


def test_metrics_that_are_called_the_same_are_there(with_adapters: Stack) -> None:
    (worker,) = with_adapters.workers
    until("served again", lambda: len(with_adapters.instances()) == 1)
    body = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 2}
    until("an answer", lambda: with_adapters.post("/v1/completions", body).status_code == 200)
    text = httpx.get(f"{worker.system_url}/metrics", timeout=30).text
    rows = [row for row in upstream_map.rows("Metrics") if row.here.startswith("same")]
    named = [name for row in rows for name in row.upstream if "*" not in name]
    assert named and [name for name in named if f"\n# TYPE {name} " not in text] == []
