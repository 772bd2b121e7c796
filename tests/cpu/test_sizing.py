"""Tests that the KV cache of a real engine has as many tokens as `size` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from dynamo_vllm.sizing import families, memory
from harness import metrics
from harness.stack import Stack


def test_blocks_of_a_real_engine_are_its_bytes_over_bytes_per_token(one_worker: Stack, model: Path) -> None:
    (worker,) = one_worker.workers
    text = httpx.get(f"http://127.0.0.1:{worker.system_port}/metrics", timeout=30).text
    said = next(sample.labels for sample in metrics.samples(text) if sample.name == "vllm:cache_config_info")
    tiny = families.read(json.loads((model / "config.json").read_text()), "tiny")
    per_block = int(said["block_size"]) * memory.token_bytes(tiny.layers, 4)  # float32 on CPU
    # Those the engine would have, had the tests not cut them short.
    found = re.search(r"Overriding num_gpu_blocks=(\d+) with", worker.log.read_text())
    assert found is not None
    assert int(found[1]) == int(said["kv_cache_memory_bytes"]) // per_block
