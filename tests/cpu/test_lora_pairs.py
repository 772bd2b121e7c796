"""Tests LoRA adapters on prefill and decode workers over NIXL: the answers equal those of one engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cpu.completions import texts
from cpu.lora import LORA, PROMPTS, Expected, ask, load, load_all, prompt, text, unload_all
from cpu.pairs import LOST, Pairs
from cpu.stacks import Start
from harness.waiting import until

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def lora_pair(start_module: Start) -> Pairs:
    return start_module.pair(*LORA)


@pytest.fixture
def pair(lora_pair: Pairs) -> Iterator[Pairs]:
    """Yields workers without adapters, and removes those that a test loads."""
    yield lora_pair
    unload_all(lora_pair.stack)


def test_adapters_on_both_equal_one_engine_and_nothing_is_computed_twice(
    pair: Pairs, adapters: dict[str, Path], expected: Expected
) -> None:
    load_all(pair.stack, adapters, "a", "b")
    for name in "ab":
        pair.stack.wait_over_two(name)
    asked = [(name, number) for name in ("tiny", "a", "b") for number in range(PROMPTS)]
    random.Random(3).shuffle(asked)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: ask(pair.stack, *case), asked))
    assert texts(answers) == [expected[case] for case in asked]
    assert all(a.not_computed >= len(prompt(n)) - 1 for a, (_, n) in zip(answers, asked, strict=True))
    assert pair.decodes[0].metric(LOST) == 0
    assert pair.prefills[0].metric("vllm:prompt_tokens_total") > 0


def test_adapter_on_the_decode_worker_alone_is_answered_there(
    pair: Pairs, adapters: dict[str, Path], expected: Expected
) -> None:
    assert load(pair.decodes[0], "a", adapters["a"]).status_code == 200
    until("the adapter", lambda: "a" in pair.stack.models())
    found = [text(pair.stack, "a", number) for number in range(6)]
    assert found == [expected["a", number] for number in range(6)]
    assert "adapter a is not loaded here" in pair.prefills[0].log.read_text()


def test_adapter_on_the_prefill_worker_alone_is_no_model(pair: Pairs, adapters: dict[str, Path]) -> None:
    assert load(pair.prefills[0], "b", adapters["b"]).status_code == 200
    body = {"model": "b", "prompt": prompt(3), "max_tokens": 1}
    until("its card", lambda: pair.stack.post("/v1/completions", body).status_code == 503)
    assert "not ready" in pair.stack.post("/v1/completions", body).json()["message"]
    assert pair.stack.models() == ["tiny"]


def test_paused_prefill_worker_is_done_without(
    pair: Pairs, adapters: dict[str, Path], expected: Expected
) -> None:
    """Neither worker may sleep: others read their memory."""
    prefill, decode = pair.prefills[0], pair.decodes[0]
    for worker in (prefill, decode):
        assert load(worker, "a", adapters["a"]).status_code == 200
        answer = worker.admin("sleep")
        assert (answer.status_code, answer.json()["error"]) == (409, "wrong_state")
        assert "other engines read its KV cache" in answer.json()["message"]
    until("the adapter", lambda: "a" in pair.stack.models())
    pair.stack.wait_over_two("a")
    assert prefill.admin("pause").status_code == 200
    cases = [("tiny", 5), ("a", 5), ("a", 3)]
    alone = [ask(pair.stack, *case) for case in cases]
    assert {answer.prefill_worker for answer in alone} == {pair.instance(decode)}
    assert prefill.admin("resume").status_code == 200
    pair.stack.wait_over_two("a")
    for answers in (alone, [ask(pair.stack, *case) for case in cases]):
        assert texts(answers) == [expected[case] for case in cases]


def test_engines_may_use_all_cores(pair: Pairs) -> None:
    """vLLM would put both onto the last core, where one of them waits for the other."""
    for worker in pair.stack.workers:
        (engine,) = [p for p in psutil.Process(worker.pid).children() if "guides" not in p.name()]
        assert engine.cpu_affinity() == psutil.Process().cpu_affinity()


def test_an_adapter_that_was_replaced_on_the_decode_worker_first_answers_with_its_new_content(
    pair: Pairs, adapters: dict[str, Path], expected: Expected
) -> None:
    """This test must be last: unfetched blocks are kept for their lease, and a pause would wait for that."""
    prefill, decode = pair.prefills[0], pair.decodes[0]
    assert load(prefill, "b", adapters["b"]).status_code == 200
    assert load(decode, "b", adapters["c"]).status_code == 200
    until("the adapter", lambda: "b" in pair.stack.models())
    lost = decode.metric(LOST)
    assert [text(pair.stack, "b", number) for number in range(6)] == [expected["c", n] for n in range(6)]
    assert decode.metric(LOST) > lost
    assert "it is of other weights than b here" in decode.log.read_text()
