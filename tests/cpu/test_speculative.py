"""Tests speculative decoding by vLLM's flag: several tokens per step, and the same answers as without it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.stack import Stack, stack
from harness.warm import Zygote

GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def guessing(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("guessing")) as made:
        made.start_frontend()
        warm.start_worker(made, model, "--speculative-config", json.dumps(GUESSING))
        yield made.wait_ready(120)


def prompts() -> list[list[int]]:
    """Returns prompts with repetitions, from which n-grams predict the next tokens."""
    chance = random.Random(11)
    return [[chance.randrange(20, 900) for _ in range(length)] * 3 for length in (1, 60)]


def ask(made: Stack, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 60, "temperature": 0.0, **more}
    answer = made.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(
    "more",
    [
        {"ignore_eos": True},
        {"stop": ["ta"]},
        {"logprobs": 2, "max_tokens": 12},
        {"guided_regex": "(ab|cd){1,9}e"},
    ],
    ids=lambda more: next(iter(more)),
)
def test_answers_are_those_of_an_engine_that_does_not_guess(
    more: dict[str, Any], guessing: Stack, one_worker: Stack
) -> None:
    for prompt in prompts():
        found, wanted = ask(guessing, prompt, **more), ask(one_worker, prompt, **more)
        for field in ("text", "finish_reason"):
            assert found["choices"][0][field] == wanted["choices"][0][field]
        assert found["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]


def test_sampled_answers_depend_on_their_seed(guessing: Stack) -> None:
    """vLLM 0.30 on CPU crashed, or used uninitialised temperatures for draft tokens."""
    more = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "ignore_eos": True}
    first, again, other = (ask(guessing, prompts()[1], seed=seed, **more) for seed in (3, 3, 4))
    assert first["choices"][0]["text"] == again["choices"][0]["text"] != other["choices"][0]["text"]


def test_guesses_were_taken(guessing: Stack) -> None:
    ask(guessing, prompts()[0], ignore_eos=True, max_tokens=200)
    assert guessing.workers[0].metric(ACCEPTED) > 0
