"""Tests speculative decoding by vLLM's flag: several tokens per step, and the same answers as without it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cpu.guessing import make
from dynamo_vllm.engine.vllm.compat.abilities import speculative_methods_on_cpu
from harness.stack import Stack, stack
from harness.warm import Zygote

pytestmark = pytest.mark.more

N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
can_draft = pytest.mark.skipif(
    "draft_model" not in speculative_methods_on_cpu(), reason="vLLM 0.31 brings the kernels"
)


@contextmanager
def started(warm: Zygote, model: Path, folder: Path, *flags: str) -> Iterator[Stack]:
    with stack(folder) as made:
        made.start_frontend()
        warm.start_worker(made, model, *flags)
        yield made.wait_ready(120)


@pytest.fixture(
    scope="module", params=["ngram", pytest.param("draft_model", marks=[can_draft, pytest.mark.long])]
)
def guessing(
    request: pytest.FixtureRequest, warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("guessing")
    guesses = N_GRAMS if request.param == "ngram" else drafts("draft_model", folder, model)
    with started(warm, model, folder, "--speculative-config", json.dumps(guesses)) as made:
        yield made


def drafts(method: str, folder: Path, model: Path, tokens: int = 3) -> dict[str, Any]:
    made = make(method, folder / method, model)
    return {"method": method, "model": str(made), "num_speculative_tokens": tokens}


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


def test_many_requests_at_once_keep_their_own_guesses(guessing: Stack, one_worker: Stack) -> None:
    chance = random.Random(12)
    every = [[chance.randrange(20, 900) for _ in range(length)] for length in (2, 30, 90, 300) * 3]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: ask(guessing, prompt, ignore_eos=True), every))
    wanted = [ask(one_worker, prompt, ignore_eos=True) for prompt in every]
    assert [a["choices"][0]["text"] for a in found] == [a["choices"][0]["text"] for a in wanted]


@can_draft
@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_guess_and_the_answers_stay(
    method: str, warm: Zygote, model: Path, tmp_path: Path, one_worker: Stack
) -> None:
    guesses = json.dumps(drafts(method, tmp_path, model, tokens=2))
    with started(warm, model, tmp_path, "--speculative-config", guesses) as made:
        assert_same_answers_of_which_some_were_guessed(made, one_worker)


@can_draft
@pytest.mark.long
def test_model_guesses_with_its_own_layer_and_the_answers_stay(
    warm: Zygote, model: Path, tmp_path: Path
) -> None:
    own, guesses = make("mtp", tmp_path / "mtp", model), {"method": "mtp", "num_speculative_tokens": 1}
    with started(warm, own, tmp_path / "plain") as plain:
        flag = ("--speculative-config", json.dumps(guesses))
        with started(warm, own, tmp_path / "guessing", *flag) as made:
            assert_same_answers_of_which_some_were_guessed(made, plain)


def assert_same_answers_of_which_some_were_guessed(made: Stack, plain: Stack) -> None:
    chance = random.Random(13)
    for length in (1, 5, 40, 100, 400, 700):
        prompt = [chance.randrange(20, 900) for _ in range(length)]
        found, wanted = (ask(each, prompt, ignore_eos=True, max_tokens=200) for each in (made, plain))
        assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert made.workers[0].metric(ACCEPTED) > 0


@pytest.mark.skipif("draft_model" in speculative_methods_on_cpu(), reason="this vLLM can")
def test_vllm_that_cannot_draft_is_not_started(warm: Zygote, model: Path, tmp_path: Path) -> None:
    """It would end with the first request."""
    guesses = json.dumps(drafts("draft_model", tmp_path, model))
    with stack(tmp_path) as made:
        worker = warm.start_worker(made, model, "--speculative-config", guesses)
        made.workers.remove(worker)
        assert worker.process.wait(60) == 2
        assert "this vLLM does not support draft_model on a CPU; use ngram" in worker.log.read_text()
