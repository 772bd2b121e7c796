"""Tests prompt embeddings over the whole stack: answers as from tokens, and bad input does no harm."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu.pairs import ENGINE_DATA, not_computed, pairs, prompts
from cpu.test_two_workers import LONG, busy_worker
from harness.stack import Stack, environment, stack
from harness.tensors import BAD, GOOD, HIDDEN, encode, rows, table
from harness.waiting import until
from harness.warm import FORKED, Zygote

FLAG = "--enable-prompt-embeds"
PAGE = Path(__file__).parents[2] / "docs" / "prompt-embeddings.md"
IDS = [10 + i * 7 % 850 for i in range(200)]


@pytest.fixture(scope="module")
def made(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("embeds")) as found:
        found.start_frontend()
        warm.start_worker(found, model, FLAG)
        yield found.wait_ready(120)


@pytest.fixture(scope="module")
def embed(model: Path) -> Any:
    """Converts token ids to what a client sends."""
    known = table(model)
    return lambda ids: encode(known[ids].clone())


@pytest.fixture(scope="module")
def reference(made: Stack) -> str:
    return str(text(ask(made, [33, 34, 35])))


@pytest.fixture
def unharmed(made: Stack, reference: str) -> Iterator[None]:
    """Checks afterwards that the same worker gives the same answer, computed and cached."""
    worker = made.workers[0]
    yield
    assert worker.process.poll() is None
    for _ in range(2):
        assert text(ask(made, [33, 34, 35])) == reference
    assert worker.busy() == 0


def ask(made: Stack, prompt: list[int] | str, max_tokens: int = 12, **more: Any) -> Any:
    """Sends a request: a list is token ids, a string is embeddings."""
    extra = {"ignore_eos": True, "nvext": ENGINE_DATA, **more.pop("extra_body", {})}
    if isinstance(prompt, str):
        extra["prompt_embeds"], prompt = prompt, ""
    given = {"temperature": 0, **more}
    return made.openai.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, extra_body=extra, **given
    )


def text(answer: Any) -> str:
    return str(answer.choices[0].text)


def streamed(chunks: Any) -> tuple[str, Any]:
    parts, usage = [], None
    for chunk in chunks:
        parts += [choice.text for choice in chunk.choices]
        usage = chunk.usage or usage
    return "".join(parts), usage


def post(made: Stack, prompt_embeds: Any, **more: Any) -> Any:
    body = {"model": "tiny", "prompt": "", "max_tokens": 4, "prompt_embeds": prompt_embeds, **more}
    return made.post("/v1/completions", body)


def test_answers_equal_those_to_the_tokens(made: Stack, embed: Any) -> None:
    for ids in prompts(10, 1500):
        wanted, found = ask(made, ids), ask(made, embed(ids))
        assert text(found) == text(wanted)
        assert found.usage.prompt_tokens == wanted.usage.prompt_tokens == len(ids)
        assert found.usage.completion_tokens == 12


def test_streamed_answer_and_usage(made: Stack, embed: Any) -> None:
    found, usage = streamed(
        ask(made, embed(IDS), stream=True, max_tokens=40, stream_options={"include_usage": True})
    )
    assert found == text(ask(made, IDS, max_tokens=40))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (200, 40, 240)


@pytest.mark.long
def test_beside_plain_requests(made: Stack, embed: Any) -> None:
    every = prompts(12, 600, seed=11)
    asked = [shape for ids in every for shape in (ids, embed(ids))]
    alone = [text(ask(made, prompt)) for prompt in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: text(ask(made, prompt)), [*asked, *asked]))
    assert together == [*alone, *alone]


def test_repeated_prompt_is_cached_and_not_taken_for_another(made: Stack) -> None:
    one, other = encode(rows(150)), encode(rows(151)[:150])
    texts = [text(ask(made, prompt)) for prompt in (one, other)]
    assert texts[0] != texts[1]
    again = [ask(made, prompt) for prompt in (one, other)]
    assert [text(answer) for answer in again] == texts
    assert all(answer.usage.prompt_tokens_details.cached_tokens == 128 for answer in again)


CASES: dict[str, dict[str, Any]] = {
    "several choices": {"n": 3, "temperature": 0.9, "seed": 5},
    "logprobs": {"logprobs": 3},
    "a stop string": {"stop": [" "], "max_tokens": 30},
    "a regex": {"extra_body": {"guided_regex": "[0-9]{5}", "ignore_eos": False}},
    "a schema": {
        "max_tokens": 60,
        "extra_body": {"guided_json": {"type": "object", "properties": {}}, "ignore_eos": False},
    },
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.5, "max_tokens": 30},
    "least tokens": {"extra_body": {"min_tokens": 10, "ignore_eos": False}, "max_tokens": 20},
    "a seed": {"seed": 3, "temperature": 1.0, "max_tokens": 30},
}


@pytest.mark.parametrize("name", CASES)
def test_options_work_as_with_tokens(made: Stack, embed: Any, name: str) -> None:
    wanted, found = ask(made, IDS, **CASES[name]), ask(made, embed(IDS), **CASES[name])
    assert [c.text for c in found.choices] == [c.text for c in wanted.choices]
    assert [c.finish_reason for c in found.choices] == [c.finish_reason for c in wanted.choices]
    if name == "logprobs":
        pairs_of = zip(
            found.choices[0].logprobs.token_logprobs, wanted.choices[0].logprobs.token_logprobs, strict=True
        )
        assert all(abs(a - b) < 1e-3 for a, b in pairs_of)


@pytest.mark.parametrize("name", GOOD)
def test_every_good_form_is_taken(made: Stack, unharmed: None, name: str) -> None:
    sent = GOOD[name]()
    plain = sent.detach().float().reshape(-1, HIDDEN)
    found = ask(made, encode(sent))
    assert found.usage.prompt_tokens == len(plain)
    assert text(found) == text(ask(made, encode(plain.clone())))


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_are_refused_and_harm_nobody(made: Stack, unharmed: None, name: str) -> None:
    sent, message = BAD[name][0](), BAD[name][1]
    for answer in (post(made, sent), post(made, sent, stream=True)):
        assert answer.status_code == 400, answer.text
        words = answer.json()["message"]
        # The frontend refuses what is no base64 in its own words.
        assert message in words or "valid base64" in words, words


def test_frontend_refuses_by_size_and_type(made: Stack, unharmed: None) -> None:
    wrong: tuple[Any, ...] = ("", "AAAA", "A" * 14_000_000, 7, [encode(rows(5))], {})
    for sent in wrong:
        answer = post(made, sent)
        assert answer.status_code == 400, answer.text


def test_rows_up_to_the_context(made: Stack, unharmed: None) -> None:
    full = ask(made, encode(rows(2047)), max_tokens=50)
    assert (full.usage.prompt_tokens, full.usage.completion_tokens) == (2047, 1)
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


def test_router_hears_of_other_prompts_and_mistakes_none(made: Stack, embed: Any) -> None:
    """Its index must have prompts sent together with embeddings, and not take embeddings for zeros."""

    def rate(prompt: list[int] | str) -> float:
        found = ask(made, prompt, 2, extra_body={"nvext": {"extra_fields": ["timing"]}})
        return float(found.model_extra["nvext"]["timing"].get("kv_hit_rate") or 0)

    def is_known(ids: list[int]) -> bool:
        return rate(ids) > 0.8 or len(ids) < 160

    every = prompts(8, 500, seed=21)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(rate, [shape for ids in every for shape in (embed(ids), ids)]))
    assert rate([0] * 320) == 0
    for ids in every[1:]:
        until("the router to know the prompt", partial(is_known, ids))
    log = made.workers[0].log.read_text()
    assert "Failed to decode" not in log
    assert "Failed to find" not in log


@pytest.mark.long
def test_killed_worker_in_mid_stream(warm: Zygote, model: Path, tmp_path: Path, embed: Any) -> None:
    """The answer continues on another worker: the same text and the same usage."""
    with stack(tmp_path) as two:
        two.start_frontend()
        for _ in range(2):
            warm.start_worker(two, model, FLAG)
        two.wait_ready(120)
        sent = embed(IDS[:70])
        how: dict[str, Any] = {"max_tokens": LONG, "stream": True, "stream_options": {"include_usage": True}}
        wanted, _ = streamed(ask(two, sent, **how))
        chunks = iter(ask(two, sent, **how))
        begun = "".join(next(chunks).choices[0].text for _ in range(20))
        os.killpg(busy_worker(two).pid, signal.SIGKILL)
        rest, usage = streamed(chunks)
        assert begun + rest == wanted
        assert (usage.prompt_tokens, usage.completion_tokens) == (70, LONG)


def test_prefill_and_decode_workers(
    made: Stack, warm: Zygote, model: Path, tmp_path: Path, embed: Any
) -> None:
    """The answers equal those of one engine, and the decode worker computes no row again."""
    with pairs(warm, model, tmp_path, 1, 1, FLAG) as pair:
        for ids in prompts(6, 900, seed=4):
            found = ask(pair.stack, embed(ids))
            assert text(found) == text(ask(made, ids))
            assert found.usage.prompt_tokens == len(ids)
            assert not_computed(found) >= len(ids) - 1
        refused = post(pair.stack, BAD["NaN"][0]())
        assert refused.status_code == 400, refused.text
        assert pair.is_alive()
        assert pair.decodes[0].metric("dynamo_component_kv_transfers_lost_total") == 0


def test_program_in_the_docs(made: Stack, warm: Zygote, model: Path, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "def encode(tensor):" in program
    program = program.replace("http://localhost:8000/v1", f"{made.url}/v1")
    program = program.replace("Qwen/Qwen3-0.6B", str(model))
    source, log = tmp_path / "program.py", tmp_path / "log"
    source.write_text(program)
    child = warm.fork("cpu.embeds:run_program", [str(source)], environment(tmp_path, **FORKED), log)
    assert child.wait(300) == 0, log.read_text()[-3000:]
    wanted = made.openai.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=16, temperature=0
    )
    assert wanted.usage is not None
    assert f"{text(wanted)}\n{wanted.usage.prompt_tokens} rows\n" in log.read_text()
