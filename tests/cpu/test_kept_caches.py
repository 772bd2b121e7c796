"""Tests a connector that finds the KV cache of a prompt by its content, without a request for it."""

from __future__ import annotations

import json
from pathlib import Path

from cpu.completions import PATH, body, complete
from cpu.stacks import Start


def test_no_logprobs_are_told_of_a_prompt_whose_cache_may_be_found(start: Start, tmp_path: Path) -> None:
    """vLLM 0.30 would return uninitialised memory; its example connector stores caches in a folder."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "caches")},
    }
    made, prompt = start("--kv-transfer-config", json.dumps(connector)), list(range(20, 320))
    expected = complete(made, prompt).text
    refused = made.post(PATH, body(prompt, prompt_logprobs=1))
    assert refused.status_code == 400
    assert "prompt_logprobs" in refused.text and "ExampleConnector" in refused.text
    assert complete(made, prompt).text == expected
    assert "External Cache Hit" in made.workers[0].log.read_text()
