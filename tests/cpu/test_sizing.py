"""The KV cache of a real engine is as many tokens as `size` says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from dynamo_vllm.sizing import families, memory
from harness.stack import Stack


def test_blocks_of_a_real_engine_are_its_bytes_over_bytes_per_token(one_worker: Stack, model: Path) -> None:
    (worker,) = one_worker.workers
    metrics = httpx.get(f"http://127.0.0.1:{worker.system_port}/metrics", timeout=10).text
    line = next(row for row in metrics.splitlines() if row.startswith("vllm:cache_config_info{"))
    said = dict(re.findall(r'(\w+)="([^"]*)"', line))
    tiny = families.read(json.loads((model / "config.json").read_text()), "tiny")
    per_block = int(said["block_size"]) * memory.token_bytes(tiny.layers, 4)  # float32 on CPU
    cache_bytes = int(said["kv_cache_memory_bytes"])
    assert int(said["num_gpu_blocks"]) == cache_bytes // per_block
