"""The parts of a gateway are killed one by one: what lives goes on, and what died is replaced."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from harness import commands
from harness import gateway as gateways
from harness.gateway import Gateway
from harness.waiting import until

pytestmark = pytest.mark.more

TOKENS = 150


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateways.fake_gateway(tmp_path_factory.mktemp("parts"), token_ms=20) as made:
        yield made


def stream(gateway: Gateway, seen: list[float]) -> int:
    """Return the tokens of a long answer; `seen` gets the time of each."""
    body = {"model": "demo-chat", "prompt": [40] * 5, "max_tokens": TOKENS, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with gateway.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen.append(time.monotonic())
                if usage := json.loads(line.removeprefix("data: ")).get("usage"):
                    return int(usage["completion_tokens"])
    return 0


def ask(gateway: Gateway) -> int:
    body = {"model": "demo-chat", "prompt": "x", "max_tokens": 1}
    with gateway.client() as client:
        return client.post("/v1/completions", json=body).status_code


def test_streams_go_on_without_the_control_app_and_new_requests_wait_for_it(gateway: Gateway) -> None:
    seen: list[float] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, gateway, seen)
        until("the first tokens", lambda: len(seen) > 3)
        first, began = gateway.control, time.monotonic()
        first.send_signal(signal.SIGKILL)
        assert ask(gateway) == 200
        print(f"answered {time.monotonic() - began:.2f} s after the control app was killed")
        assert gateway.control.pid != first.pid
        assert running.result() == TOKENS


@pytest.mark.parametrize("name", ["gateway", "envoy"])
def test_part_that_is_restarted_by_a_command_lets_a_stream_finish(name: str, gateway: Gateway) -> None:
    seen: list[float] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, gateway, seen)
        until("the first tokens", lambda: len(seen) > 3)
        words = ("restart", name, "--run-dir", str(gateway.run_folder))
        assert commands.output(gateway.env, *words, seconds=120).startswith(f"{name}: ready after ")
        assert running.result() == TOKENS
    assert ask(gateway) == 200


def test_what_was_used_is_still_known(gateway: Gateway) -> None:
    def tokens() -> int:
        found = gateway.http.get("/v1/usage").json()["data"]
        return sum(one["completion_tokens"] for one in found)

    def recorded() -> int:
        found = tokens()
        return found if found >= TOKENS else 0

    assert stream(gateway, []) == TOKENS
    known = until("the records", recorded, every=0.1)
    gateway.control.send_signal(signal.SIGKILL)
    assert ask(gateway) == 200
    until("the records, and one more", lambda: tokens() > known, every=0.1)


def test_everything_ends_with_serve(gateway: Gateway) -> None:
    parts = gateway.serving.below()
    gateway.serving.stop()
    assert not [part for part in parts if part.is_running() and part.status() != psutil.STATUS_ZOMBIE]
