"""Tests sleep and wake of real engines: requests go to the other worker meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu.streams import Load, stream_text
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from harness.warm import Zygote

CYCLES = int(os.environ.get("DYNAMO_VLLM_CYCLES", "4"))
"""The number of cycles; CI uses the default: each of two workers at both levels."""


@pytest.fixture
def two_workers(warm: Zygote, model: Path, tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as made:
        made.start_frontend()
        for _ in range(2):
            warm.start_worker(made, model, "--drain-seconds", "20")
        yield made.wait_ready(120)


def state(worker: Worker) -> str:
    return str(worker.admin("status").json()["state"])


def test_cycles_under_load_lose_nothing(two_workers: Stack) -> None:
    """One of two workers is always available; levels 1 and 2 alternate."""
    undisturbed = {number: stream_text(two_workers, number) for number in range(4)}
    with Load(two_workers) as load:
        for cycle in range(CYCLES):
            worker = two_workers.workers[cycle % 2]
            slept = worker.admin("sleep", level=1 + cycle // 2 % 2)
            assert (slept.status_code, state(worker)) == (200, "asleep"), slept.text
            assert worker.health() == 503
            assert worker.busy() == 0
            woken = worker.admin("wake_up")
            assert (woken.status_code, state(worker)) == (200, "ready"), woken.text
            until("both in discovery", lambda: len(two_workers.instances()) == 2)
        load.settled()
    assert load.failures == []
    assert len(load.texts) >= CYCLES
    assert all(text == undisturbed[number] for number, text in load.texts)


def test_only_worker_asleep_gives_503_and_wakes_with_the_same_answer(
    warm: Zygote, model: Path, tmp_path: Path
) -> None:
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model)
        made.wait_ready(120)
        before = stream_text(made, 3)
        assert worker.admin("sleep").json() | {"seconds": 0} == {
            "status": "success",
            "level": 1,
            "seconds": 0,
            "freed_bytes": None,
            "already": False,
        }
        until("out of discovery", lambda: not made.instances())
        answer = made.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})
        assert answer.status_code == 503
        assert worker.admin("clear_kv_blocks").status_code == 409
        assert worker.admin("sleep").json()["already"] is True
        assert worker.admin("sleep", level=2).status_code == 409
        assert worker.admin("wake_up").status_code == 200
        until("in discovery", lambda: made.instances())
        assert stream_text(made, 3) == before


@pytest.mark.long
def test_asleep_longer_than_a_hang_takes_to_be_seen_is_not_unwell(
    warm: Zygote, model: Path, tmp_path: Path
) -> None:
    watch = ("--canary-seconds", "0.2", "--canary-timeout-seconds", "0.4", "--health-seconds", "0.1")
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *watch)
        made.wait_ready(120)
        worker.admin("pause", mode="wait")
        began = worker.admin("status").json()["uptime_seconds"]
        until("some canaries' time", lambda: worker.admin("status").json()["uptime_seconds"] > began + 2)
        assert state(worker) == "paused"
        worker.admin("resume")
        assert state(worker) == "ready"
        assert stream_text(made, 1)
        assert "taken out of service" not in worker.log.read_text()


@pytest.mark.long
def test_paused_request_goes_on_after_resume(warm: Zygote, model: Path, tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model)
        made.wait_ready(120)
        undisturbed = stream_text(made, 5)
        with Load(made, clients=1) as load:
            until("a request", lambda: worker.busy() == 1)
            assert worker.admin("pause", mode="keep").status_code == 200
            held = worker.metric("vllm:generation_tokens_total")
            load.stopping.set()
            assert worker.metric("vllm:generation_tokens_total") == held
            assert worker.admin("resume").status_code == 200
        assert load.failures == [] and load.texts
        until("in discovery", lambda: made.instances())
        assert stream_text(made, 5) == undisturbed


def test_cleared_cache_is_cold(one_worker: Stack) -> None:
    """A request gives the same answer as before."""

    def ask() -> tuple[str, int]:
        answer = one_worker.openai.completions.create(
            model="tiny", prompt=[20 + i % 700 for i in range(640)], max_tokens=8, temperature=0
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    first, again = ask(), ask()
    assert again[1] >= 608
    worker = one_worker.workers[0]
    until("no request", lambda: worker.busy() == 0)
    assert worker.admin("clear_kv_blocks").json() == {"status": "success", "kinds": ["prefix"]}
    assert ask() == (first[0], 0)
    assert worker.admin("reset_caches").json()["kinds"] == ["prefix", "multimodal", "encoder"]
    assert ask() == (first[0], 0)


@pytest.mark.long
def test_profile_is_written(warm: Zygote, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    plain = {"torch_profiler_with_stack": False, "ignore_frontend": True}  # stacks take vLLM a minute
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder), **plain})
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, "--profiler-config", config)
        made.wait_ready(120)
        assert worker.admin("start_profile", prefix="one").json()["folder"] == str(folder)
        again = worker.admin("start_profile", prefix="two")
        assert again.status_code in (200, 409), "vLLM 0.32 refuses it, others ignore it"
        assert again.status_code == 200 or again.json()["error"] == "wrong_state"
        made.openai.completions.create(model="tiny", prompt="a", max_tokens=2)
        assert worker.admin("stop_profile").status_code == 200
        until("a trace", lambda: any(folder.rglob("*.json*")))


def test_worker_without_profiler_says_how_to_get_one(one_worker: Stack) -> None:
    answer = one_worker.workers[0].admin("start_profile")
    assert answer.status_code == 409 and "--profiler-config" in answer.json()["message"]
