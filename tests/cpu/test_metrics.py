"""Tests the worker's /metrics: it has vLLM's series and ours, each once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from harness import metrics
from harness.stack import Stack, stack
from harness.warm import Zygote

EARLIER = """
from prometheus_client import Counter
labels = {"model_name": "tiny", "engine": "0"}
Counter("vllm:generation_tokens", "", list(labels)).labels(**labels).inc(1000)
"""


def series(made: Stack, worker: int = 0) -> list[str]:
    text = httpx.get(f"http://127.0.0.1:{made.workers[worker].system_port}/metrics", timeout=30).text
    return list(map(metrics.series, metrics.samples(text)))


def test_vllm_and_component_series_are_there_once(one_worker: Stack) -> None:
    one_worker.openai.completions.create(model="tiny", prompt=[20, 21], max_tokens=3)
    found = series(one_worker)
    names = {line.split("{")[0] for line in found}
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
    assert [line for line, count in Counter(found).items() if count > 1] == []


def test_generated_tokens_are_counted(one_worker: Stack) -> None:
    worker = one_worker.workers[0]
    before = worker.metric("vllm:generation_tokens_total")
    one_worker.openai.completions.create(
        model="tiny", prompt=[20, 21], max_tokens=7, extra_body={"ignore_eos": True}
    )
    assert worker.metric("vllm:generation_tokens_total") - before == 7


def test_total_blocks_are_known_to_the_router(one_worker: Stack) -> None:
    assert one_worker.workers[0].metric("dynamo_component_total_blocks") > 10


def test_operator_sees_what_vllm_counts(one_worker: Stack) -> None:
    worker, prompt = one_worker.workers[0], list(range(20, 148))
    for _ in range(2):
        one_worker.openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=20, extra_body={"ignore_eos": True}
        )
    hits, asked = (worker.metric(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    (rank,) = worker.admin("status").json()["ranks"]
    assert rank["hit_rate"] == pytest.approx(hits / asked, abs=0.05)
    assert rank["hit_rate"] > 0.2
    assert rank["tokens_per_second"] > 0


def test_workers_in_one_folder_for_metrics_show_their_own(warm: Zygote, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", EARLIER], env={**os.environ, **shared}, check=True)
    left = sorted(folder.iterdir())
    with stack(tmp_path, **shared) as made:
        made.start_frontend("--router", "round-robin")
        workers = [warm.start_worker(made, model) for _ in range(2)]
        made.wait_ready(120)
        for _ in range(4):
            made.openai.completions.create(
                model="tiny", prompt=[20, 21], max_tokens=5, extra_body={"ignore_eos": True}
            )
        assert [worker.metric("vllm:generation_tokens_total") for worker in workers] == [10, 10]
        for number in range(2):
            assert [line for line, count in Counter(series(made, number)).items() if count > 1] == []
        assert len({path.parent for path in folder.glob("*/*.db")}) == 2
        for worker in workers:
            worker.signal(signal.SIGTERM)
        assert [worker.process.wait(60) for worker in workers] == [0, 0]
    assert sorted(folder.iterdir()) == left
