"""After `serve` everything but the HTTP port listens for this machine only."""

from __future__ import annotations

from pathlib import Path

from harness import listening
from harness.served import Serving, own_environment, served
from harness.waiting import until


def for_others(serving: Serving) -> set[int]:
    """The ports that other machines may reach."""
    found = listening.for_other_machines([process.pid for process in serving.below()])
    return {listener.port for listener in found}


def test_only_the_http_port_does_where_it_is_asked_to(model: Path, tmp_path: Path) -> None:
    """Two workers with two ranks each; test_serve.py looks at prefill and decode."""
    words = ("--engine", "fake", "--fake-engine", '{"ranks": 2}', "--workers", "2", "--host", "0.0.0.0")
    with served(tmp_path, "--model", str(model), *words, "--open") as serving:
        until("the rest on loopback", lambda: for_others(serving) == {serving.stack.port})


def test_only_envoy_does_behind_a_gateway(model: Path, tmp_path: Path) -> None:
    env = own_environment(tmp_path) | {"VLLM_API_KEY": "sk-of-listeners", "XDG_DATA_HOME": str(tmp_path)}
    words = ("--model", str(model), "--engine", "fake", "--host", "0.0.0.0")
    with served(tmp_path, *words, env=env) as serving:
        until("the rest on loopback", lambda: for_others(serving) == {serving.stack.port})
