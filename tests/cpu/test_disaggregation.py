"""Prefill and decode in two engines over NIXL: the answers are those of one engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.stack import Stack, stack
from harness.warm import Zygote

NIXL = ("--connector", "nixl")
pytestmark = pytest.mark.timeout(180)


def start(warm: Zygote, made: Stack, model: Path, prefills: int, decodes: int) -> Stack:
    made.start_frontend()
    for _ in range(decodes):
        warm.start_worker(made, model, *NIXL, "--disaggregation-mode", "decode")
    for _ in range(prefills):
        warm.start_worker(made, model, *NIXL, "--disaggregation-mode", "prefill")
    return made.wait_ready(90)


@pytest.fixture(scope="module")
def pair(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("pair")) as made:
        yield start(warm, made, model, 1, 1)


def prompts(count: int, longest: int) -> list[list[int]]:
    chance = random.Random(3)
    lengths = [1, longest, *(chance.randrange(1, longest) for _ in range(count - 2))]
    return [[chance.randrange(10, 900) for _ in range(length)] for length in lengths]


def ask(made: Stack, prompt: list[int], **more: Any) -> Any:
    return made.openai.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True, **more}
    )


def ask_all(made: Stack, every: list[list[int]]) -> list[Any]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: ask(made, prompt), every))


def test_fifty_prompts_equal_one_engine_and_nothing_is_computed_twice(pair: Stack, one_worker: Stack) -> None:
    every = prompts(50, 1500)
    found, wanted = ask_all(pair, every), ask_all(one_worker, every)
    assert [a.choices[0].text for a in found] == [a.choices[0].text for a in wanted]
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in found]
    # The last token of a prompt is always computed: its output is the answer's first.
    assert all(n >= len(prompt) - 1 for n, prompt in zip(cached, every, strict=True))
    assert pair.workers[0].metric("dynamo_component_kv_transfers_lost_total") == 0
