"""Tests speculative decoding by vLLM's flag: several tokens per step, and the same answers as without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cpu.completions import complete, complete_all, texts
from cpu.guessing import make
from cpu.stacks import Start
from dynamo_vllm.engine.vllm.compat.abilities import speculative_methods_on_cpu
from harness.stack import Stack

pytestmark = pytest.mark.more

N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
can_draft = pytest.mark.skipif(
    "draft_model" not in speculative_methods_on_cpu(), reason="vLLM 0.31 brings the kernels"
)


@pytest.fixture(
    scope="module", params=["ngram", pytest.param("draft_model", marks=[can_draft, pytest.mark.long])]
)
def guessing(
    request: pytest.FixtureRequest, start_module: Start, tmp_path_factory: pytest.TempPathFactory
) -> Stack:
    guesses = N_GRAMS
    if request.param != "ngram":
        guesses = drafts("draft_model", tmp_path_factory.mktemp("guessing"), start_module.model)
    return start_module("--speculative-config", json.dumps(guesses))


def drafts(method: str, folder: Path, model: Path, tokens: int = 3) -> dict[str, Any]:
    made = make(method, folder / method, model)
    return {"method": method, "model": str(made), "num_speculative_tokens": tokens}


def prompts() -> list[list[int]]:
    """Returns prompts with repetitions, from which n-grams predict the next tokens."""
    chance = random.Random(11)
    return [[chance.randrange(20, 900) for _ in range(length)] * 3 for length in (1, 60)]


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 60},
        {"stop": ["ta"], "max_tokens": 60, "ignore_eos": False},
        {"logprobs": 2, "max_tokens": 12, "ignore_eos": False},
        {"guided_regex": "(ab|cd){1,9}e", "max_tokens": 60, "ignore_eos": False},
    ],
    ids=lambda more: next(iter(more)),
)
def test_answers_are_those_of_an_engine_that_does_not_guess(
    more: dict[str, Any], guessing: Stack, one_worker: Stack
) -> None:
    for prompt in prompts():
        answer, expected = (complete(made, prompt, **more) for made in (guessing, one_worker))
        assert (answer.text, answer.finishes, answer.tokens) == (
            expected.text,
            expected.finishes,
            expected.tokens,
        )


def test_sampled_answers_depend_on_their_seed(guessing: Stack) -> None:
    """vLLM 0.30 on CPU crashed, or used uninitialised temperatures for draft tokens."""
    more = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
    first, again, other = (complete(guessing, prompts()[1], 60, seed=seed, **more).text for seed in (3, 3, 4))
    assert first == again != other


def test_many_requests_at_once_keep_their_own_guesses(guessing: Stack, one_worker: Stack) -> None:
    chance = random.Random(12)
    every = [[chance.randrange(20, 900) for _ in range(length)] for length in (2, 30, 90, 300) * 3]
    assert texts(complete_all(guessing, every, 60)) == texts(
        complete(one_worker, prompt, 60) for prompt in every
    )
    complete(guessing, prompts()[0], 200)
    assert guessing.workers[0].metric(ACCEPTED) > 0, "guesses were taken"


@can_draft
@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_guess_and_the_answers_stay(
    method: str, start: Start, tmp_path: Path, one_worker: Stack
) -> None:
    guesses = json.dumps(drafts(method, tmp_path, start.model, tokens=2))
    assert_same_answers_of_which_some_were_guessed(start("--speculative-config", guesses), one_worker)


@can_draft
@pytest.mark.long
def test_model_guesses_with_its_own_layer_and_the_answers_stay(start: Start, tmp_path: Path) -> None:
    own, guesses = make("mtp", tmp_path / "mtp", start.model), {"method": "mtp", "num_speculative_tokens": 1}
    made = start("--speculative-config", json.dumps(guesses), model=own)
    assert_same_answers_of_which_some_were_guessed(made, start(model=own))


def assert_same_answers_of_which_some_were_guessed(made: Stack, plain: Stack) -> None:
    chance = random.Random(13)
    for length in (1, 5, 40, 100, 400, 700):
        prompt = [chance.randrange(20, 900) for _ in range(length)]
        assert complete(made, prompt, 200).text == complete(plain, prompt, 200).text
    assert made.workers[0].metric(ACCEPTED) > 0


@pytest.mark.skipif("draft_model" in speculative_methods_on_cpu(), reason="this vLLM can")
def test_vllm_that_cannot_draft_is_not_started(start: Start, tmp_path: Path) -> None:
    """It would end with the first request."""
    guesses = json.dumps(drafts("draft_model", tmp_path, start.model))
    worker = start.warm.start_worker(start.empty(), start.model, "--speculative-config", guesses)
    assert worker.process.wait(60) == 2
    assert "this vLLM does not support draft_model on a CPU; use ngram" in worker.log.read_text()
