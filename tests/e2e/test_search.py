"""`serve --demo search` and `dynamo-vllm search` with real engines: three models answer together."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from harness.processes import COMMAND
from harness.served import Serving, own_environment, served

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(tmp_path_factory.mktemp("search"), "--demo", "search", seconds=400) as made:
        yield made


def search(running: Serving, question: str, *words: str) -> dict[str, Any]:
    env = own_environment(running.output.parent)
    asked = [*COMMAND, "search", running.url, question, "--json", *words]
    done = subprocess.run(asked, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_three_demos_are_served_behind_a_gateway_without_keys(running: Serving) -> None:
    assert running.models == ["demo-chat", "demo-embed", "demo-rerank"]
    listed = httpx.get(f"{running.url}/v1/models", timeout=30).json()["data"]
    kinds = {one["id"]: one["kind"] for one in listed}
    assert kinds == {"demo-chat": "generate", "demo-embed": "pooling", "demo-rerank": "pooling"}


@pytest.mark.parametrize(
    ("question", "page"),
    [
        ("How do I load an adapter?", "docs/lora.md"),
        ("How are API keys created and revoked?", "docs/gateway.md"),
        ("How do prefill and decode workers exchange the KV cache?", "docs/disaggregation.md"),
    ],
)
def test_search_finds_the_page(running: Serving, question: str, page: str) -> None:
    found = search(running, question)
    assert page in [one["page"] for one in found["pages"]]
    assert found["models"] == {
        "embeddings": "demo-embed",
        "reranking": "demo-rerank",
        "chat": "demo-chat",
    }
    assert found["answer"] and found["answer_source"] == "training"
