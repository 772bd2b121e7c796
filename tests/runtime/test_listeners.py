"""After `serve` everything but the HTTP port listens for this machine only, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_vllm.models.tiny import make_tiny_model
from harness import listening
from harness.served import Serving, own_environment, served
from harness.waiting import until

LAYOUTS = {
    "aggregated": ("--workers", "2"),
    "prefill and decode": ("--prefill", "1", "--decode", "1"),
    "encode, prefill and decode": ("--encode", "1", "--prefill", "1", "--decode", "1"),
    "ranks": ("--fake-engine", json.dumps({"ranks": 2})),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def for_others(serving: Serving) -> list[listening.Listener]:
    return listening.for_other_machines([process.pid for process in serving.below()])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_listens_for_other_machines(layout: str, model: Path, tmp_path: Path) -> None:
    with served(tmp_path, "--model", str(model), "--engine", "fake", *LAYOUTS[layout]) as serving:
        until("loopback only", lambda: for_others(serving) == [])


def test_only_the_http_port_does_where_it_is_asked_to(model: Path, tmp_path: Path) -> None:
    words = ("--model", str(model), "--engine", "fake", "--host", "0.0.0.0", "--open")
    with served(tmp_path, *words) as serving:
        until("the rest on loopback", lambda: len(for_others(serving)) == 1)
        assert [one.port for one in for_others(serving)] == [serving.stack.port]


def test_only_envoy_does_behind_a_gateway(model: Path, tmp_path: Path) -> None:
    env = {
        **own_environment(tmp_path),
        "VLLM_API_KEY": "sk-of-the-listeners",
        "XDG_DATA_HOME": str(tmp_path / "d"),
    }
    words = ("--model", str(model), "--engine", "fake", "--host", "0.0.0.0")
    with served(tmp_path, *words, env=env) as serving:
        until("the rest on loopback", lambda: len({one.port for one in for_others(serving)}) == 1)
        assert {one.port for one in for_others(serving)} == {serving.stack.port}
