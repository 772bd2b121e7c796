"""Tests two workers with tiers: a prompt goes to the one that has it in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpu.completions import Completion, complete, texts
from cpu.lora import load_all
from cpu.stacks import Start, live_check
from cpu.streams import prompt
from cpu.test_tiers import BLOCK_TOKENS, LOADED
from harness.stack import Stack
from harness.waiting import until, until_spread

pytestmark = pytest.mark.more

TOKENS, PROMPTS = 640, 12
SMALL = ("--num-gpu-blocks-override", "50", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "1024")
"""An engine that holds two prompts."""


@pytest.fixture(scope="module")
def two_workers(start_module: Start, adapters: dict[str, Path]) -> Stack:
    made = start_module(*SMALL, "--kv-offload-gb", "0.1", "--enable-lora", workers=2)
    load_all(made, adapters, "a")
    return made


def ask(made: Stack, number: int, **more: Any) -> Completion:
    return complete(made, prompt(number, TOKENS), **more)


def loaded(made: Stack) -> float:
    return sum(worker.metric(LOADED) for worker in made.workers)


@pytest.mark.parametrize(
    "kind", [{}, {"nvext": {"cache_salt": "mine"}}, {"model": "a"}], ids=["plain", "salt", "adapter"]
)
def test_evicted_prompt_goes_to_the_worker_that_has_it_in_host_memory(
    two_workers: Stack, kind: dict[str, Any]
) -> None:
    first = until_spread(lambda n: ask(two_workers, n, **kind), lambda answer: answer.worker, least=PROMPTS)
    before = loaded(two_workers)
    again = [ask(two_workers, number, **kind) for number in range(len(first))]
    assert [answer.worker for answer in again] == [answer.worker for answer in first]
    assert texts(again) == texts(first)
    assert all(answer.cached >= TOKENS - BLOCK_TOKENS for answer in again)
    left = sum(0.7 < answer.hit_rate < 0.76 for answer in again)
    assert left >= PROMPTS - 4, "most have left the engines' caches"
    assert loaded(two_workers) > before


def test_operator_sees_what_the_tiers_hold_and_do(two_workers: Stack) -> None:
    for number in [*range(PROMPTS), *range(PROMPTS)]:
        ask(two_workers, number)
    for worker in two_workers.workers:
        until("an idle engine", lambda worker=worker: worker.busy() == 0)  # type: ignore[misc]
        (host,) = worker.admin("status").json()["tiers"]
        assert (host["tier"], host["bytes"]) == ("host", 100_000_000)
        assert 0 < host["used_bytes"] <= host["bytes"]
        assert host["used_bytes"] == worker.metric("vllm:kv_offload_host_bytes")
        assert worker.metric("dynamo_component_kv_tier_bytes", tier="host") == 100_000_000
        assert host["read_bytes"] == worker.metric(LOADED)
        assert host["hit_tokens"] == worker.metric("vllm:external_prefix_cache_hits_total") > 0
        assert host["read_seconds"] > 0 and host["written_bytes"] > 0 and host["written_seconds"] > 0


def test_every_tier_is_proven_and_clients_keep_their_caches(two_workers: Stack) -> None:
    last = ask(two_workers, 99)
    steps = [step for step in live_check(two_workers) if step["name"] == "tiers"]
    assert [step["outcome"] for step in steps] == ["ok", "ok"]
    assert all("128 of 129 prompt tokens came from its tiers" in step["figure"] for step in steps)
    again = ask(two_workers, 99)
    assert (again.worker, again.cached >= TOKENS - BLOCK_TOKENS) == (last.worker, True)
