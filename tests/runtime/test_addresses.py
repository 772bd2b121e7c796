"""Workers with a whole address, in another namespace than the environment says: all find them there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models.vision import make_tiny_vision_model

from cpu.vision import chat, image, picture
from harness.commands import output
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from runtime.conftest import fake

OURS = ("--namespace", "ours")
LOST = "dynamo_component_encodings_lost_total"
Start = Callable[..., Worker]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path, DYN_NAMESPACE="elsewhere") as made:
        made.start_frontend(*OURS)
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model") / "tiny", "qwen2-vl")


@pytest.fixture
def start_at(deployment: Stack, model: Path) -> Start:
    """Starts a worker with the fake engine at an address, and waits for it."""

    def start(address: str, *flags: str) -> Worker:
        words = (*fake(model, media={"image": 2}), "--endpoint", f"dyn://{address}")
        worker = deployment.start_worker(*words, *flags)
        until(f"{address} ready", lambda: deployment._is_ready(worker))
        return worker

    return start


def completed(made: Stack) -> dict[str, Any]:
    """Returns an answer, from the moment on when the frontend knows the model."""
    made.wait_listed("tiny")
    body = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 4}
    found = made.post("/v1/completions", {**body, "nvext": {"extra_fields": ["worker_id"]}})
    assert found.status_code == 200, found.text
    return dict(found.json())


def registered(made: Stack) -> set[str]:
    """Returns the addresses of all endpoints in discovery."""
    cards = [json.loads(path.read_text()) for path in (made.folder / "discovery").glob("v1/instances/*")]
    return {f"{card['namespace']}.{card['component']}.{card['endpoint']}" for card in cards}


def test_worker_registers_and_counts_there_and_operators_find_it(deployment: Stack, start_at: Start) -> None:
    worker = start_at("ours.mine.answer")
    assert completed(deployment)["usage"]["completion_tokens"] == 4
    found = registered(deployment)
    assert "ours.mine.answer" in found
    assert {address for address in found if not address.startswith("ours.")} == set()
    labels = {"dynamo_namespace": "ours", "dynamo_component": "mine", "dynamo_endpoint": "answer"}
    assert worker.metric("dynamo_component_requests_total", **labels) == 1
    env = deployment.environment()
    assert "asleep after" in output(env, "sleep", *OURS)
    assert worker.admin("status").json()["state"] == "asleep"
    assert "awake after" in output(env, "wake", *OURS)
    until("served again", lambda: "ours.mine.answer" in registered(deployment))
    told = json.loads(output(env, "status", "--json", *OURS, "--url", deployment.url))
    assert [(one["state"], one["name"]) for one in told["workers"]] == [("ready", "ours.mine")]
    assert "ours.mine.answer" in [one["address"] for one in told["instances"]]


@pytest.mark.parametrize(
    ("encoder", "named"),
    [
        ("ours.encoder.generate", ()),
        ("ours.looking.generate", ("--encoder-component", "looking")),
        ("theirs.looking.encode", ("--encoder-component", "dyn://theirs.looking.encode")),
    ],
)
def test_encode_workers_are_found(
    deployment: Stack, start_at: Start, tmp_path: Path, encoder: str, named: tuple[str, ...]
) -> None:
    flags = ("--enable-multimodal", "--ec-storage-path", str(tmp_path / "encoded"), "--log-level", "debug")
    encoding = start_at(encoder, "--disaggregation-mode", "encode", *flags)
    asking = start_at("ours.mine.answer", "--route-to-encoder", *named, *flags)
    deployment.wait_listed("tiny")
    body = {"model": "tiny", "messages": chat([image(picture(1))]), "max_tokens": 4}
    found = deployment.post("/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    assert encoding.log.read_text().count("media to encode") == 1
    assert asking.metric(LOST) == 0


def test_prefill_and_decode_workers_find_each_other(deployment: Stack, start_at: Start) -> None:
    decode = start_at("ours.second.answer", "--disaggregation-mode", "decode")
    prefill = start_at("ours.first.answer", "--disaggregation-mode", "prefill")
    deployment.wait_listed("tiny").wait_over_two()
    assert set(completed(deployment)["nvext"]["worker_id"]) >= {"prefill_worker_id", "decode_worker_id"}
    assert "ours.kv_terms.compare" in registered(deployment)
    assert prefill.metric("dynamo_component_requests_total") >= 2
    assert decode.metric("dynamo_component_kv_transfers_lost_total") == 0
