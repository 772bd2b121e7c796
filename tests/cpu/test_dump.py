"""Tests that a start which fails in the engine leaves a file with vLLM's resolved arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cpu.stacks import Start


def test_failed_start_leaves_the_arguments_as_vllm_understood_them(
    start: Start, model: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    file = tmp_path / "config.json"
    flags = ("--dump-config-to", str(file), "--hf-token", "sesame")
    assert start.warm.start_worker(start.empty(), broken, *flags).process.wait(60) == 1
    dump = json.loads(file.read_text())
    vllm = dump["vllm"]
    assert (vllm["dtype"], vllm["max_model_len"], vllm["tensor_parallel_size"]) == ("float32", 2048, 1)
    assert vllm["block_size"] > 0 and vllm["max_num_batched_tokens"] > 0
    assert vllm["kv_events_config"]["enable_kv_cache_events"] is True
    assert dump["engine_flags"]["max_model_len"] == "2048"
    assert "engine" not in dump and "sesame" not in file.read_text()
