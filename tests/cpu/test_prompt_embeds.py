"""Tests prompt embeddings over the whole stack: answers as from tokens, and bad input does no harm.

`tests/contract/test_embeds.py` has every good form and every bad one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu.children import Children
from cpu.completions import PATH, Completion, body, complete, complete_all, texts
from cpu.pairs import LOST, Pairs, prompts
from cpu.streams import streamed
from cpu.vision import chat, image, picture
from harness.stack import Stack
from harness.tensors import BAD, GOOD, HIDDEN, encode, rows, table
from harness.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "prompt-embeddings.md"
IDS = [10 + i * 7 % 850 for i in range(200)]
Embed = Callable[[list[int]], str]


@pytest.fixture(scope="module")
def made(embeds_worker: Stack) -> Stack:
    return embeds_worker


@pytest.fixture(scope="module")
def embed(model: Path) -> Embed:
    """Converts token ids to what a client sends."""
    known = table(model)
    return lambda ids: encode(known[ids].clone())


@pytest.fixture(scope="module")
def reference(made: Stack) -> str:
    return ask(made, [33, 34, 35]).text


@pytest.fixture
def unharmed(made: Stack, reference: str) -> Iterator[None]:
    """Checks afterwards that the same worker gives the same answer, computed and cached."""
    worker = made.workers[0]
    yield
    assert worker.process.poll() is None
    assert [ask(made, [33, 34, 35]).text for _ in range(2)] == [reference] * 2
    assert worker.busy() == 0


def fields(prompt: list[int] | str) -> dict[str, Any]:
    """A list is token ids, a string is embeddings."""
    return {"prompt": "", "prompt_embeds": prompt} if isinstance(prompt, str) else {"prompt": prompt}


def ask(made: Stack, prompt: list[int] | str, max_tokens: int = 12, **more: Any) -> Completion:
    return complete(made, max_tokens=max_tokens, **fields(prompt), **more)


def post(made: Stack, prompt_embeds: Any, **more: Any) -> Any:
    return made.post(PATH, body("", 4, prompt_embeds=prompt_embeds, **more))


def test_answers_equal_those_to_the_tokens(made: Stack, embed: Embed) -> None:
    for ids in prompts(10, 1500):
        expected, answer = ask(made, ids), ask(made, embed(ids))
        assert answer.text == expected.text
        assert answer.prompt_tokens == expected.prompt_tokens == len(ids)
        assert answer.tokens == 12


def test_streamed_answer_and_usage(made: Stack, embed: Embed) -> None:
    extra = {"ignore_eos": True, "prompt_embeds": embed(IDS)}
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    create = made.openai.completions.create
    text, usage = streamed(create(model="tiny", prompt="", max_tokens=40, extra_body=extra, **options))
    assert text == ask(made, IDS, 40).text
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (200, 40, 240)


def test_repeated_prompt_is_cached_and_not_taken_for_another(made: Stack) -> None:
    both = encode(rows(150)), encode(rows(151)[:150])
    answers, again = ([ask(made, prompt) for prompt in both] for _ in range(2))
    assert answers[0].text != answers[1].text
    assert texts(again) == texts(answers)
    assert all(answer.cached == 128 for answer in again)


CASES: dict[str, dict[str, Any]] = {
    "several choices": {"n": 3, "temperature": 0.9, "seed": 5},
    "logprobs": {"logprobs": 3},
    "a stop string": {"stop": [" "], "max_tokens": 30},
    "a regex": {"guided_regex": "[0-9]{5}", "ignore_eos": False},
    "a schema": {"max_tokens": 60, "guided_json": {"type": "object", "properties": {}}, "ignore_eos": False},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.5, "max_tokens": 30},
    "least tokens": {"min_tokens": 10, "ignore_eos": False, "max_tokens": 20},
    "a seed": {"seed": 3, "temperature": 1.0, "max_tokens": 30},
}


@pytest.mark.parametrize("name", CASES)
def test_options_work_as_with_tokens(made: Stack, embed: Embed, name: str) -> None:
    expected, answer = (ask(made, prompt, **CASES[name]) for prompt in (IDS, embed(IDS)))
    assert (answer.texts, answer.finishes) == (expected.texts, expected.finishes)
    if name == "logprobs":
        told = (each.answer["choices"][0]["logprobs"]["token_logprobs"] for each in (answer, expected))
        assert next(told) == pytest.approx(next(told), abs=1e-3)


@pytest.mark.parametrize("name", ["float16", "a batch of one", "transposed"])
def test_good_forms_are_taken(made: Stack, unharmed: None, name: str) -> None:
    sent = GOOD[name]()
    plain = sent.detach().float().reshape(-1, HIDDEN)
    answer = ask(made, encode(sent))
    assert answer.prompt_tokens == len(plain)
    assert answer.text == ask(made, encode(plain.clone())).text


@pytest.mark.parametrize(
    "name",
    ["a pickle of code", "a sparse tensor of terabytes", "too wide", "NaN", "a value that overflows inside"],
)
def test_bad_ones_are_refused_and_harm_nobody(made: Stack, unharmed: None, name: str) -> None:
    sent, message = BAD[name][0](), BAD[name][1]
    for answer in (post(made, sent), post(made, sent, stream=True)):
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["message"]


def test_frontend_refuses_by_size_and_type(made: Stack, unharmed: None) -> None:
    wrong: tuple[Any, ...] = ("", "AAAA", "A" * 14_000_000, 7, [encode(rows(5))], {}, "!" + encode(rows(5)))
    for sent in wrong:
        answer = post(made, sent)
        assert answer.status_code == 400, answer.text


def test_rows_up_to_the_context(made: Stack, unharmed: None) -> None:
    full = ask(made, encode(rows(2047)), 50)
    assert (full.prompt_tokens, full.tokens) == (2047, 1)
    for count in (2048, 4500):
        answer = post(made, encode(rows(count, dtype=torch.float16)))
        assert answer.status_code == 400
        assert f"prompt_embeds: has {count} rows; this model accepts 2047" in answer.json()["message"]


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"echo": True}, {"echo": True, "logprobs": 1}])
def test_probabilities_of_the_prompt_are_refused(made: Stack, unharmed: None, more: dict[str, Any]) -> None:
    answer = post(made, encode(rows(5)), **more)
    assert answer.status_code == 400
    assert "prompt_logprobs: not available with prompt_embeds" in answer.json()["message"]


def test_worker_without_the_flag_says_so(one_worker: Stack) -> None:
    answer = post(one_worker, encode(rows(5)))
    assert answer.status_code == 400
    assert "prompt_embeds: this worker was started without" in answer.json()["message"]


def test_text_model_that_is_told_to_take_images_says_that_it_takes_none(made: Stack) -> None:
    assert made.workers[0].log.read_text().count("--enable-multimodal does nothing") == 1
    asked = {"model": "tiny", "messages": chat([image(picture(1))]), "max_tokens": 1}
    answer = made.post("/v1/chat/completions", asked)
    assert (answer.status_code, "this model takes text only" in answer.text) == (400, True), answer.text


def test_router_hears_of_other_prompts_and_mistakes_none(made: Stack, embed: Embed) -> None:
    """Its index must have prompts sent together with embeddings, and not take embeddings for zeros."""

    def is_known(ids: list[int]) -> bool:
        return ask(made, ids, 2).hit_rate > 0.8 or len(ids) < 160

    every = prompts(8, 500, seed=21)
    with ThreadPoolExecutor(8) as pool:
        asked = [shape for ids in every for shape in (embed(ids), ids)]
        list(pool.map(lambda prompt: ask(made, prompt, 2), asked))
    assert ask(made, [0] * 320, 2).hit_rate == 0
    for ids in every[1:]:
        until("the router to know the prompt", partial(is_known, ids))
    log = made.workers[0].log.read_text()
    assert "Failed to decode" not in log
    assert "Failed to find" not in log


def test_prefill_and_decode_workers(made: Stack, pair: Pairs, embed: Embed) -> None:
    """The answers equal those of one engine, and the decode worker computes no row again."""
    every = prompts(6, 900, seed=4)
    answers = [ask(pair.stack, embed(ids)) for ids in every]
    assert texts(answers) == texts(complete_all(made, every, 12))
    assert [answer.prompt_tokens for answer in answers] == [len(ids) for ids in every]
    assert all(a.not_computed >= len(ids) - 1 for a, ids in zip(answers, every, strict=True))
    refused = post(pair.stack, BAD["NaN"][0]())
    assert refused.status_code == 400, refused.text
    assert pair.is_alive()
    assert pair.decodes[0].metric(LOST) == 0


def test_program_in_the_docs(made: Stack, children: Children, model: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "def encode(tensor):" in program
    program = program.replace("http://localhost:8000/v1", f"{made.url}/v1")
    source = tmp_path / "program.py"
    source.write_text(program.replace("Qwen/Qwen3-0.6B", str(model)))
    child = children.start("embeds:run_program", str(source))
    child.answer()
    expected = complete(made, "Once upon a time", 16, ignore_eos=False)
    assert f"{expected.text}\n{expected.prompt_tokens} rows\n" in child.log
