"""Tests two workers: the cache decides where a request goes, and a stopping one loses no answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpu.completions import complete
from cpu.stacks import Start
from cpu.streams import LONG, Load, kill_in_mid_stream, prompt, stream, stream_text
from cpu.test_metrics import series
from harness.stack import Stack
from harness.waiting import until, until_spread

CYCLES = int(os.environ.get("DYNAMO_VLLM_CYCLES", "4"))
"""The number of cycles of sleep; CI uses the default: each of two workers at both levels."""
EARLIER = """
from prometheus_client import Counter
labels = {"model_name": "tiny", "engine": "0"}
Counter("vllm:generation_tokens", "", list(labels)).labels(**labels).inc(1000)
"""


@pytest.fixture(scope="module")
def metrics_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes count in, with figures of an earlier one."""
    folder = tmp_path_factory.mktemp("metrics")
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", EARLIER], env=env, check=True)
    return folder


@pytest.fixture(scope="module")
def two_workers(start_module: Start, metrics_folder: Path) -> Stack:
    """The tests of this file follow each other: each leaves two workers to the next one."""
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(metrics_folder)}
    return start_module("--drain-seconds", "1", workers=2, settings=shared)


def test_repeats_go_to_the_warm_worker(two_workers: Stack) -> None:
    """Each shows its own figures, and the operator sees what vLLM counts."""
    answers = until_spread(lambda n: complete(two_workers, prompt(n, 640), 2), lambda a: a.worker, least=12)
    again = [complete(two_workers, prompt(number, 640), 2) for number in range(len(answers))]
    assert [(a.worker, a.cached >= 608) for a in again] == [(a.worker, True) for a in answers]
    asked = [answer.worker for answer in (*answers, *again)]
    told = {worker.metric("vllm:generation_tokens_total") for worker in two_workers.workers}
    assert told == {2 * asked.count(worker) for worker in set(asked)}
    for worker in two_workers.workers:
        assert series(worker)
        hits, queries = (worker.metric(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
        (rank,) = worker.admin("status").json()["ranks"]
        assert rank["hit_rate"] == pytest.approx(hits / queries, abs=0.05)
        assert rank["hit_rate"] > 0.2 and rank["tokens_per_second"] > 0


def test_rolling_restart_under_load_loses_nothing(
    two_workers: Stack, start_module: Start, metrics_folder: Path
) -> None:
    """The drain budget is shorter than the answers, so requests also migrate in mid-stream."""
    undisturbed = {number: stream_text(two_workers, number) for number in range(4)}
    before = set(metrics_folder.iterdir())
    assert len(before) == 3, "a file of the earlier process, and a folder of each worker"
    with Load(two_workers) as load:
        for worker in list(two_workers.workers):
            load.settled()
            worker.signal(signal.SIGTERM)
            assert worker.process.wait(60) == 0, worker.log.read_text()[-2000:]
            two_workers.workers.remove(worker)
            fresh = start_module.warm.start_worker(two_workers, start_module.model, "--drain-seconds", "20")
            until("the replacement", fresh.is_ready, 120)
            until("both in discovery", lambda: len(two_workers.instances()) == 2)
        load.settled()
    assert load.failures == []
    assert len(load.texts) >= 12
    assert all(text == undisturbed[number] for number, text in load.texts)
    left = before & set(metrics_folder.iterdir())
    assert [path.is_file() for path in left] == [True], "what a worker counted ends with it"


def test_sleep_and_wake_under_load_lose_nothing(two_workers: Stack) -> None:
    """One of two workers is always available; levels 1 and 2 alternate."""
    undisturbed = {number: stream_text(two_workers, number) for number in range(4)}
    with Load(two_workers) as load:
        for cycle in range(CYCLES):
            worker = two_workers.workers[cycle % 2]
            for verb, more, state in (
                ("sleep", {"level": 1 + cycle // 2 % 2}, "asleep"),
                ("wake_up", {}, "ready"),
            ):
                answer = worker.admin(verb, **more)
                assert answer.status_code == 200, answer.text
                assert worker.admin("status").json()["state"] == state
                if state == "asleep":
                    assert (worker.health(), worker.busy()) == (503, 0)
            until("both in discovery", lambda: len(two_workers.instances()) == 2)
        load.settled()
    assert load.failures == []
    assert len(load.texts) >= CYCLES
    assert all(text == undisturbed[number] for number, text in load.texts)


def test_killed_worker_in_mid_stream(two_workers: Stack) -> None:
    """The stream continues on the other worker; text and usage equal those of an undisturbed run."""
    _, usage = kill_in_mid_stream(lambda: stream(two_workers, 9, LONG), two_workers.workers)
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, LONG)
    assert usage.prompt_tokens_details is not None, "cached tokens are told of a moved request too"
