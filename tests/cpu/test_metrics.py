"""Tests the worker's /metrics: it has vLLM's series and ours, each once."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import httpx

from cpu.completions import complete
from dynamo_vllm.sizing import families, memory
from harness import metrics
from harness.stack import Stack, Worker


def series(worker: Worker) -> list[str]:
    """Each of them, of which none may be there twice."""
    text = httpx.get(f"{worker.system_url}/metrics", timeout=30).text
    names = [metrics.series(sample) for sample in metrics.samples(text)]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    return names


def test_vllm_and_component_series_are_there(one_worker: Stack) -> None:
    complete(one_worker, [20, 21], 3)
    names = {line.split("{")[0] for line in series(one_worker.workers[0])}
    assert {
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "dynamo_component_total_blocks",
        "dynamo_component_active_blocks",
        "dynamo_component_gpu_cache_usage_percent",
        "dynamo_component_requests_waiting",
        "dynamo_component_requests_total",
    } <= names


def test_generated_tokens_are_counted(one_worker: Stack) -> None:
    worker = one_worker.workers[0]
    before = worker.metric("vllm:generation_tokens_total")
    complete(one_worker, [20, 21], 7)
    assert worker.metric("vllm:generation_tokens_total") - before == 7


def test_blocks_of_a_real_engine_are_its_bytes_over_bytes_per_token(one_worker: Stack, model: Path) -> None:
    """The KV cache has as many tokens as `size` says."""
    (worker,) = one_worker.workers
    text = httpx.get(f"{worker.system_url}/metrics", timeout=30).text
    said = next(sample.labels for sample in metrics.samples(text) if sample.name == "vllm:cache_config_info")
    tiny = families.read(json.loads((model / "config.json").read_text()), "tiny")
    per_block = int(said["block_size"]) * memory.token_bytes(tiny.layers, 4)  # float32 on CPU
    # Those the engine would have, had the tests not cut them short.
    blocks = re.search(r"Overriding num_gpu_blocks=(\d+) with", worker.log.read_text())
    assert blocks is not None
    assert int(blocks[1]) == int(said["kv_cache_memory_bytes"]) // per_block
    assert worker.metric("dynamo_component_total_blocks") == int(said["num_gpu_blocks"])
