"""Tests data-parallel ranks on both sides of a hand-over: each rank of prefill and decode takes part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_models.moe import make_tiny_moe_model

from cpu import spread_experts
from cpu.pairs import not_computed, pairs
from cpu.ranks import prompt
from harness import metrics
from harness.served import own_environment, served
from harness.stack import Stack, stack
from harness.warm import CACHE_BLOCKS, Zygote

pytestmark = pytest.mark.more

TWO_RANKS = ("--data-parallel-size", "2")
LENGTH, COUNT = 640, 12
IN_SERVE = (
    *("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32"),
    *("--num-gpu-blocks-override", str(CACHE_BLOCKS), "--served-model-name", "tiny", "--no-warm-up"),
)


@dataclass
class Figures:
    """Reads /metrics of one worker."""

    url: str

    def total(self, name: str, **labels: object) -> float:
        return metrics.total(httpx.get(f"{self.url}/metrics", timeout=30).text, name, **labels)


def ask(made: Stack, number: int) -> Any:
    return made.openai.completions.create(
        model="tiny",
        prompt=prompt(number, LENGTH),
        max_tokens=8,
        temperature=0,
        extra_body={"nvext": {"extra_fields": ["worker_id", "engine_data"]}, "ignore_eos": True},
    )


def ask_all(made: Stack) -> list[Any]:
    """Sends several requests at once, so that the router spreads them over all ranks."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: ask(made, number), range(COUNT)))


def texts(answers: Sequence[Any]) -> list[str]:
    return [answer.choices[0].text for answer in answers]


def rank(answer: Any, role: str) -> int:
    return int(answer.model_extra["nvext"]["worker_id"][f"{role}_dp_rank"])


def assert_every_rank_hands_over(made: Stack, alone: Stack, prefill: Figures, decode: Figures) -> None:
    first = ask_all(made)
    assert texts(first) == texts(ask_all(alone))
    assert {not_computed(answer) for answer in first} == {LENGTH}, "decode computed nothing"
    for role, worker, name in (
        ("prefill", prefill, "vllm:prompt_tokens_total"),
        ("decode", decode, "vllm:generation_tokens_total"),
    ):
        asked = [sum(rank(answer, role) == each for answer in first) for each in (0, 1)]
        assert all(asked), f"no {role} on one of the ranks"
        assert [worker.total(name, engine=each) > 0 for each in (0, 1)] == [True, True]
    again = [ask(made, number) for number in range(COUNT)]
    assert texts(again) == texts(first)
    assert [rank(answer, "prefill") for answer in again] == [rank(answer, "prefill") for answer in first]
    assert all(answer.usage.prompt_tokens_details.cached_tokens >= LENGTH - 32 for answer in again)
    assert decode.total("dynamo_component_kv_transfers_lost_total") == 0


def test_ranks_hand_over_to_ranks(warm: Zygote, model: Path, one_worker: Stack, tmp_path: Path) -> None:
    with pairs(warm, model, tmp_path, 1, 1, *TWO_RANKS) as made:
        prefill, decode = (Figures(each[0].system_url) for each in (made.prefills, made.decodes))
        assert_every_rank_hands_over(made.stack, one_worker, prefill, decode)


@pytest.mark.long
def test_ranks_with_experts_hand_over_to_ranks(warm: Zygote, tmp_path: Path) -> None:
    """In small what large mixtures of experts are served with: ranks step together, each has a part."""
    model = make_tiny_moe_model(tmp_path / "moe")
    folders = [tmp_path / name for name in ("alone", "apart")]
    for folder in folders:
        folder.mkdir()
    with stack(folders[0]) as alone:
        alone.start_frontend()
        warm.start_worker(alone, model)
        with pairs(warm, model, folders[1], 1, 1, *TWO_RANKS, call=spread_experts.CALL) as made:
            prefill, decode = (Figures(each[0].system_url) for each in (made.prefills, made.decodes))
            assert_every_rank_hands_over(made.stack, alone.wait_ready(), prefill, decode)


@pytest.mark.long
def test_serve_starts_ranks_that_hand_over(model: Path, one_worker: Stack, tmp_path: Path) -> None:
    roles, run = ("--prefill", "1", "--decode", "1", *TWO_RANKS), tmp_path / "run"
    env = own_environment(tmp_path)
    with served(tmp_path, str(model), *roles, *IN_SERVE, "--run-dir", str(run), env=env) as made:
        found = json.loads((run / "prometheus.json").read_text())
        urls = {each["labels"]["process"]: f"http://{each['targets'][0]}" for each in found}
        workers = (Figures(urls[name]) for name in ("prefill-1", "decode-1"))
        assert_every_rank_hands_over(made.stack.wait_over_two(), one_worker, *workers)
