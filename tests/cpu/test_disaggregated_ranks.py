"""Tests data-parallel ranks on both sides of a hand-over: each rank of prefill and decode takes part."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tiny_models.moe import make_tiny_moe_model

from cpu import spread_experts
from cpu.completions import complete, complete_all, texts
from cpu.pairs import LOST
from cpu.ranks import PROMPTS, TWO_RANKS, expected_texts
from cpu.stacks import Start
from harness import metrics
from harness.served import own_environment, served
from harness.stack import Stack
from harness.warm import CACHE_BLOCKS

pytestmark = pytest.mark.more

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


def assert_every_rank_hands_over(made: Stack, alone: Stack, prefill: Figures, decode: Figures) -> None:
    first = complete_all(made, PROMPTS, at_once=4)
    assert texts(first) == expected_texts(alone)
    assert {answer.not_computed for answer in first} == {len(PROMPTS[0])}, "decode computed nothing"
    for role, worker, name in (
        ("prefill", prefill, "vllm:prompt_tokens_total"),
        ("decode", decode, "vllm:generation_tokens_total"),
    ):
        assert {answer.rank(role) for answer in first} == {0, 1}, f"no {role} on one of the ranks"
        assert [worker.total(name, engine=each) > 0 for each in (0, 1)] == [True, True]
    again = [complete(made, prompt) for prompt in PROMPTS]
    assert texts(again) == texts(first)
    assert [answer.rank("prefill") for answer in again] == [answer.rank("prefill") for answer in first]
    assert all(answer.cached >= len(PROMPTS[0]) - 32 for answer in again)
    assert decode.total(LOST) == 0


def test_ranks_hand_over_to_ranks(start: Start, one_worker: Stack) -> None:
    made = start.pair(*TWO_RANKS)
    prefill, decode = (Figures(each[0].system_url) for each in (made.prefills, made.decodes))
    assert_every_rank_hands_over(made.stack, one_worker, prefill, decode)


@pytest.mark.long
def test_ranks_with_experts_hand_over_to_ranks(start: Start, tmp_path: Path) -> None:
    """In small what large mixtures of experts are served with: ranks step together, each has a part."""
    model = make_tiny_moe_model(tmp_path / "moe")
    alone, made = start(model=model), start.pair(*TWO_RANKS, model=model, call=spread_experts.CALL)
    prefill, decode = (Figures(each[0].system_url) for each in (made.prefills, made.decodes))
    assert_every_rank_hands_over(made.stack, alone, prefill, decode)


@pytest.mark.long
def test_serve_starts_ranks_that_hand_over(model: Path, one_worker: Stack, tmp_path: Path) -> None:
    roles, run = ("--prefill", "1", "--decode", "1", *TWO_RANKS), tmp_path / "run"
    env = own_environment(tmp_path)
    with served(tmp_path, str(model), *roles, *IN_SERVE, "--run-dir", str(run), env=env) as made:
        found = json.loads((run / "prometheus.json").read_text())
        urls = {each["labels"]["process"]: f"http://{each['targets'][0]}" for each in found}
        workers = (Figures(urls[name]) for name in ("prefill-1", "decode-1"))
        assert_every_rank_hands_over(made.stack.wait_over_two(), one_worker, *workers)
