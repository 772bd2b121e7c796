"""/tokenize and /detokenize through real workers with the fake engine's tokens, a character each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.gateways import Gateway, gateway
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack")) as made:
        made.start_frontend()
        made.start_worker(*fake(model))
        yield made.wait_ready()


@pytest.fixture(scope="module")
def gate(running: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(running.url, folder, discovery=running.environment()["DYN_FILE_KV"]) as made:
        yield made


def post(gate: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(gate.url + path, json=body, timeout=60)


def test_worker_tokenises(gate: Gateway) -> None:
    found = until("a worker", lambda: post(gate, "/tokenize", model="tiny", prompt="abc"))
    assert found.json() == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [1, 97, 98, 99],
        "token_strs": None,
    }
    chat = [{"role": "user", "content": "ab"}]
    assert post(gate, "/tokenize", messages=chat, return_token_strs=True).json()["token_strs"] == ["a", "b"]
    assert post(gate, "/detokenize", model="tiny", tokens=[97, 98]).json() == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404),
        ("/tokenize", {"model": 5, "prompt": "a"}, 400),
        ("/tokenize", {"model": "tiny"}, 400),
        ("/tokenize", {"prompt": "a" * 3_000_000}, 400),
        ("/tokenize", {"prompt": "a" * 9_000_000}, 413),
        ("/detokenize", {"tokens": ["a"]}, 400),
    ],
)
def test_bad_requests_are_refused(gate: Gateway, path: str, body: dict[str, Any], status: int) -> None:
    found = post(gate, path, **body)
    assert (found.status_code, set(found.json())) == (status, {"type", "error"})


def test_worker_that_comes_and_goes_is_noticed(gate: Gateway, running: Stack, model: Path) -> None:
    worker = running.start_worker(*fake(model), "--served-model-name", "other")

    def status() -> int:
        return post(gate, "/tokenize", model="other", prompt="a").status_code

    until("the new worker", lambda: status() == 200)
    assert post(gate, "/tokenize", prompt="a").status_code == 400, "two models, and none is named"
    worker.signal(15)
    worker.process.wait(60)
    running.workers.remove(worker)
    until("it is gone", lambda: status() == 404)
    assert post(gate, "/tokenize", prompt="a").status_code == 200
