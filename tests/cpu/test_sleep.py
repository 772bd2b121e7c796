"""Tests sleep, wake, pause and profiles of real engines; test_two_workers has sleep under load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpu.completions import complete
from cpu.stacks import Start
from cpu.streams import Load, stream_text
from harness.stack import Stack
from harness.waiting import until


def test_only_worker_asleep_gives_503_and_wakes_with_the_same_answer(one_worker: Stack) -> None:
    (worker,) = one_worker.workers
    before = stream_text(one_worker, 3)
    assert worker.admin("sleep").json() | {"seconds": 0} == {
        "status": "success",
        "level": 1,
        "seconds": 0,
        "freed_bytes": None,
        "already": False,
    }
    until("out of discovery", lambda: not one_worker.instances())
    answer = one_worker.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 503
    assert worker.admin("clear_kv_blocks").status_code == 409
    assert worker.admin("sleep").json()["already"] is True
    assert worker.admin("sleep", level=2).status_code == 409
    assert worker.admin("wake_up").status_code == 200
    until("in discovery", lambda: one_worker.instances())
    assert stream_text(one_worker, 3) == before


@pytest.mark.long
def test_asleep_longer_than_a_hang_takes_to_be_seen_is_not_unwell(start: Start) -> None:
    made = start("--canary-seconds", "0.2", "--canary-timeout-seconds", "0.4", "--health-seconds", "0.1")
    (worker,) = made.workers
    worker.admin("pause", mode="wait")
    began = worker.admin("status").json()["uptime_seconds"]
    until("some canaries' time", lambda: worker.admin("status").json()["uptime_seconds"] > began + 2)
    assert worker.admin("status").json()["state"] == "paused"
    worker.admin("resume")
    assert worker.admin("status").json()["state"] == "ready"
    assert stream_text(made, 1)
    assert "taken out of service" not in worker.log.read_text()


@pytest.mark.long
def test_paused_request_goes_on_after_resume(one_worker: Stack) -> None:
    (worker,) = one_worker.workers
    undisturbed = stream_text(one_worker, 5)
    with Load(one_worker, clients=1) as load:
        until("a request", lambda: worker.busy() == 1)
        assert worker.admin("pause", mode="keep").status_code == 200
        held = worker.metric("vllm:generation_tokens_total")
        load.stopping.set()
        assert worker.metric("vllm:generation_tokens_total") == held
        assert worker.admin("resume").status_code == 200
    assert load.failures == [] and load.texts
    until("in discovery", lambda: one_worker.instances())
    assert stream_text(one_worker, 5) == undisturbed


def test_cleared_cache_is_cold(one_worker: Stack) -> None:
    """A request gives the same answer as before."""

    def ask() -> tuple[str, int]:
        answer = complete(one_worker, [20 + i % 700 for i in range(640)])
        return answer.text, answer.cached

    first, again = ask(), ask()
    assert again[1] >= 608
    worker = one_worker.workers[0]
    until("no request", lambda: worker.busy() == 0)
    assert worker.admin("clear_kv_blocks").json() == {"status": "success", "kinds": ["prefix"]}
    assert ask() == (first[0], 0)
    assert worker.admin("reset_caches").json()["kinds"] == ["prefix", "multimodal", "encoder"]
    assert ask() == (first[0], 0)


@pytest.mark.long
def test_profile_is_written(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    plain = {"torch_profiler_with_stack": False, "ignore_frontend": True}  # stacks take vLLM a minute
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder), **plain})
    made = start("--profiler-config", config)
    (worker,) = made.workers
    assert worker.admin("start_profile", prefix="one").json()["folder"] == str(folder)
    again = worker.admin("start_profile", prefix="two")
    assert again.status_code in (200, 409), "vLLM 0.32 refuses it, others ignore it"
    assert again.status_code == 200 or again.json()["error"] == "wrong_state"
    complete(made, "a", 2)
    assert worker.admin("stop_profile").status_code == 200
    until("a trace", lambda: any(folder.rglob("*.json*")))


def test_worker_without_profiler_says_how_to_get_one(one_worker: Stack) -> None:
    answer = one_worker.workers[0].admin("start_profile")
    assert answer.status_code == 409 and "--profiler-config" in answer.json()["message"]
