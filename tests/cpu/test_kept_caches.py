"""Tests a connector that finds the KV cache of a prompt by its content, without a request for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.stack import Stack, stack
from harness.warm import Zygote


@pytest.fixture(scope="module")
def keeping(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Uses vLLM's example connector, which stores caches in a folder; LMCache and KVBM need a GPU."""
    folder = tmp_path_factory.mktemp("keeping")
    kept = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "caches")},
    }
    with stack(folder) as made:
        made.start_frontend()
        warm.start_worker(made, model, "--kv-transfer-config", json.dumps(kept))
        yield made.wait_ready(120)


def test_no_logprobs_are_told_of_a_prompt_whose_cache_may_be_found(keeping: Stack) -> None:
    """vLLM 0.30 would return uninitialised memory."""
    body = {"model": "tiny", "prompt": list(range(20, 320)), "max_tokens": 8, "temperature": 0}
    wanted = keeping.post("/v1/completions", body).json()["choices"][0]["text"]
    refused = keeping.post("/v1/completions", body | {"prompt_logprobs": 1})
    assert refused.status_code == 400
    assert "prompt_logprobs" in refused.text and "ExampleConnector" in refused.text
    assert keeping.post("/v1/completions", body).json()["choices"][0]["text"] == wanted
    assert "External Cache Hit" in keeping.workers[0].log.read_text()
