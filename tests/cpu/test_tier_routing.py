"""Tests two workers with tiers: a prompt goes to the one that has it in host memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.streams import prompt
from harness.processes import COMMAND
from harness.stack import Stack, stack
from harness.waiting import until, until_spread
from harness.warm import Zygote

pytestmark = pytest.mark.more

TOKENS, BLOCK_TOKENS, PROMPTS = 640, 32, 12
SMALL = ("--num-gpu-blocks-override", "50", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "1024")
"""An engine that holds two prompts."""
LOADED = "vllm:kv_offload_load_bytes_total"


@pytest.fixture(scope="module")
def two_workers(
    warm: Zygote, model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("two")) as made:
        made.start_frontend()
        for _ in range(2):
            warm.start_worker(made, model, *SMALL, "--kv-offload-gb", "0.1", "--enable-lora")
        made.wait_ready(120)
        for worker in made.workers:
            worker.admin("load_lora", lora_name="a", source={"uri": str(adapters["a"])}).raise_for_status()
        until("the adapter", lambda: "a" in made.models())
        yield made


def ask(made: Stack, number: int, **more: Any) -> Any:
    extra = {"ignore_eos": True, "nvext": {"extra_fields": ["worker_id", "timing"]}, **more.pop("body", {})}
    return made.openai.completions.create(
        prompt=prompt(number, TOKENS),
        extra_body=extra,
        **{"model": "tiny", "max_tokens": 8, "temperature": 0, **more},
    )


def who(answer: Any) -> int:
    return int(answer.model_extra["nvext"]["worker_id"]["decode_worker_id"])


def loaded(made: Stack) -> float:
    return sum(worker.metric(LOADED) for worker in made.workers)


@pytest.mark.parametrize(
    "kind", [{}, {"body": {"cache_salt": "mine"}}, {"model": "a"}], ids=["plain", "salt", "adapter"]
)
def test_evicted_prompt_goes_to_the_worker_that_has_it_in_host_memory(
    two_workers: Stack, kind: dict[str, Any]
) -> None:
    first = until_spread(lambda number: ask(two_workers, number, **kind), who, least=PROMPTS)
    before = loaded(two_workers)
    again = [ask(two_workers, number, **kind) for number in range(len(first))]
    assert [who(answer) for answer in again] == [who(answer) for answer in first]
    assert [answer.choices[0].text for answer in again] == [answer.choices[0].text for answer in first]
    assert all(answer.usage.prompt_tokens_details.cached_tokens >= TOKENS - BLOCK_TOKENS for answer in again)
    rates = [answer.model_extra["nvext"]["timing"]["kv_hit_rate"] for answer in again]
    assert sum(0.7 < rate < 0.76 for rate in rates) >= PROMPTS - 4, "most have left the engines' caches"
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
    done = subprocess.run(
        [*COMMAND, "check", "--live", two_workers.url, "--json", "--strict"],
        env=two_workers.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    steps = [step for step in json.loads(done.stdout) if step["name"] == "tiers"]
    assert (done.returncode, [step["outcome"] for step in steps]) == (0, ["ok", "ok"]), done.stdout
    assert all("128 of 129 prompt tokens came from its tiers" in step["figure"] for step in steps)
    again = ask(two_workers, 99)
    assert who(again) == who(last)
    assert again.usage.prompt_tokens_details.cached_tokens >= TOKENS - BLOCK_TOKENS
