"""Pooling workers in the real runtime: every path of the frontend, and several workers."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import commands
from harness.stack import Stack, Worker, environment
from harness.waiting import until
from runtime.conftest import StartFake

pytestmark = pytest.mark.more


def running(worker: Worker) -> int:
    return int(worker.metric("dynamo_component_requests_in_flight"))


POOLS = ("--disaggregation-mode", "pooling")


def test_frontend_tells_its_paths_apart(deployment: Stack, start_fake: StartFake) -> None:
    """The worker sees no path: if a newer frontend adds other fields, this fails."""
    start_fake(*POOLS, "--served-model-name", "embeds", pooling="embed")
    start_fake(*POOLS, "--served-model-name", "classifies", pooling="classify", labels=3)
    start_fake(*POOLS, "--served-model-name", "scores", pooling="classify")
    deployment.wait_ready().wait_listed("embeds", "classifies", "scores")
    found = deployment.openai.embeddings.create(model="embeds", input=["ab", "c"])
    assert [len(item.embedding) for item in found.data] == [8, 8]
    assert found.usage.prompt_tokens == 3
    classes = deployment.post("/v1/classify", {"model": "classifies", "input": ["a", "b"]}).json()
    assert [item["num_classes"] for item in classes["data"]] == [3, 3]
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"task": "classify"}):
        pooled = deployment.post("/v1/pooling", {"model": "classifies", "input": "a", **more}).json()
        assert pooled["data"][0]["object"] == "pooling"
    ranked = deployment.post(
        "/v1/rerank", {"model": "scores", "query": "ab", "documents": ["c", "ab"], "top_n": 1}
    ).json()
    assert ranked == [{"index": 1, "score": 1.0, "document": "ab"}]


def test_requests_go_to_the_worker_with_fewer(deployment: Stack, start_fake: StartFake) -> None:
    workers = [start_fake(*POOLS, pooling="embed", stall_on_token=ord("x")) for _ in range(2)]
    deployment.wait_ready()

    def ask(text: str, seconds: float) -> int:
        body = {"model": "tiny", "input": text}
        return httpx.post(f"{deployment.url}/v1/embeddings", json=body, timeout=seconds).status_code

    with ThreadPoolExecutor(4) as clients:
        stuck = [clients.submit(ask, "x", 60) for _ in range(2)]
        until("each has one", lambda: [running(worker) for worker in workers] == [1, 1])
        third = clients.submit(ask, "x", 60)
        until("one has two", lambda: sorted(running(worker) for worker in workers) == [1, 2])
        fuller = workers[0] if running(workers[0]) == 2 else workers[1]
        before = fuller.metric("dynamo_component_requests_total")
        assert [ask("a", 30) for _ in range(6)] == [200] * 6
        assert fuller.metric("dynamo_component_requests_total") == before
        for worker in workers:
            worker.signal(signal.SIGKILL)
        assert all(one.result() >= 500 for one in (*stuck, third))


def test_a_model_of_another_kind_is_refused_at_the_start(deployment: Stack, start_fake: StartFake) -> None:
    worker = start_fake(pooling="embed")
    assert worker.process.wait(60) == 1
    assert "is a pooling model; start it with --runner pooling" in worker.log.read_text()


def test_bench_measures_two_servers_by_turns(
    deployment: Stack, start_fake: StartFake, tmp_path: Path
) -> None:
    start_fake(*POOLS, pooling="embed")
    deployment.wait_ready()
    out = tmp_path / "figures.json"
    words = ["--items", "3", "--requests", "4", "--rounds", "2", "--json", str(out)]
    words += [f"--server=one={deployment.url}", f"--server=two={deployment.url}"]
    words += ["--watch", f"one.worker={deployment.workers[0].pid}"]
    env = environment(tmp_path)
    for api in ("embeddings", "rerank"):
        text = commands.output(env, "bench", "pooling", *words, "--api", api, seconds=120)
        assert "one / two:" in text
        turns: list[dict[str, Any]] = json.loads(out.read_text())["turns"]
        assert [turn["server"] for turn in turns] == ["one", "two", "two", "one"]
        assert all(turn["items_per_second"] > 0 for turn in turns)
        assert [list(turn["cpu_us_per_item"]) for turn in turns[:2]] == [["one.worker"], []]
    refused = commands.run(env, "bench", "pooling", "--server", "http://127.0.0.1:1", seconds=120)
    assert (refused.returncode, "error: " in refused.stderr) == (1, True)
    assert "Traceback" not in refused.stderr
