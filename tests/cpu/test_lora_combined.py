"""Tests LoRA adapters combined with other features, on workers that load them at their start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cpu import streams
from cpu.completions import PATH, Completion, body, complete
from cpu.lora import LORA, PROMPTS, Expected, ask, load_all, loaded, prompt, unload_all
from cpu.ranks import TWO_RANKS
from cpu.stacks import Start
from cpu.streams import LONG, kill_in_mid_stream
from harness.stack import Stack
from harness.tensors import encode, table
from harness.waiting import until, until_spread

pytestmark = pytest.mark.more


def flags(adapters: dict[str, Path]) -> tuple[str, ...]:
    shared = (*LORA, "--enable-prompt-embeds", "--max-num-batched-tokens", "256", "--drain-seconds", "2")
    return (*shared, "--lora-modules", *(f"{name}={adapters[name]}" for name in "ab"))


@pytest.fixture(scope="module")
def two(start_module: Start, adapters: dict[str, Path]) -> Stack:
    """Yields one worker with direct egress and one without; long prompts are computed in several steps."""
    made = start_module.frontend()
    for flag in ("--direct-egress", "--no-direct-egress"):
        start_module.warm.start_worker(made, start_module.model, *flags(adapters), flag)
    return made.wait_ready(120)


def answers(made: Stack, *names: str) -> dict[tuple[str, int], Completion]:
    """Returns the answers to all prompts, several at once."""
    cases = [(name, number) for name in names for number in range(PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(cases, pool.map(lambda case: ask(made, *case), cases), strict=True))


def assert_equal(found: dict[tuple[str, int], Completion], expected: Expected) -> None:
    texts = {case: answer.text for case, answer in found.items()}
    assert texts == {case: expected[case] for case in found}


def test_both_ways_out_of_the_engine_equal_bare_vllm(two: Stack, expected: Expected) -> None:
    assert sorted(two.models()) == ["a", "b", "tiny"]
    answered: set[tuple[str, int]] = set()

    def every_adapter_by_both() -> bool:
        found = answers(two, "tiny", "a", "b")
        assert_equal(found, expected)
        answered.update((model, answer.worker) for (model, _), answer in found.items())
        return len(answered) == 6

    until("both workers to have answered with each", every_adapter_by_both)


def test_prompt_embeddings_are_answered_by_the_adapter(two: Stack, model: Path, expected: Expected) -> None:
    known = table(model)
    for name in ("a", "tiny"):
        for number in range(1, 6):
            sent = encode(known[prompt(number)].clone())
            assert complete(two, "", 16, model=name, prompt_embeds=sent).text == expected[name, number]


@pytest.mark.parametrize("name", ["tiny", "a"])
def test_salted_prompt_goes_where_it_is_cached_and_counts_for_no_other(two: Stack, name: str) -> None:
    def asked(number: int, salt: str | None) -> tuple[int, int, float]:
        nvext = {"cache_salt": salt} if salt else {}
        answer = complete(two, streams.prompt(number, 640), 2, model=name, nvext=nvext)
        return answer.worker, answer.cached, answer.hit_rate

    first = until_spread(lambda number: asked(number, "mine"), lambda answer: answer[0])
    again = [asked(number, "mine") for number in range(len(first))]
    assert again == [(worker, 608, 1.0) for worker, _, _ in first]
    for salt in ("other", None):
        assert asked(0, salt)[1:] == (0, 0.0)


@pytest.mark.long
def test_killed_worker_in_mid_stream(two: Stack, start_module: Start, adapters: dict[str, Path]) -> None:
    """The other worker continues with the adapter, and a new worker has it from its start."""
    killed, usage = kill_in_mid_stream(lambda: streams.stream(two, 9, LONG, model="a"), two.workers)
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, LONG)
    two.workers.remove(killed)
    fresh = start_module.warm.start_worker(two, start_module.model, *flags(adapters))
    until("the new worker", fresh.is_ready, 120)
    assert loaded(fresh) == ["a", "b"]


@pytest.mark.long
def test_text_mode(start: Start, adapters: dict[str, Path], expected: Expected) -> None:
    made = start(*LORA, "--use-vllm-tokenizer")
    load_all(made, adapters, "a")
    assert_equal(answers(made, "a") | {("tiny", 0): ask(made, "tiny", 0)}, expected)
    chat = made.openai.chat.completions.create(
        model="a", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert (chat.model, chat.usage.completion_tokens) == ("a", 3)  # type: ignore[union-attr]
    assert made.post(PATH, body("x", model="b")).status_code == 404
    salts: tuple[dict[str, str], ...] = ({}, {}, {"cache_salt": "s"}, {"cache_salt": "s"})
    cached = [complete(made, [50] * 320, 1, model="a", nvext=salt).cached for salt in salts]
    assert cached == [0, 288, 0, 288]


@pytest.mark.long
def test_data_parallel_ranks(start: Start, adapters: dict[str, Path], expected: Expected) -> None:
    made = start(*LORA, *TWO_RANKS)
    load_all(made, adapters, "a")
    told = answers(made, "a")
    assert {answer.rank() for answer in told.values()} == {0, 1}
    assert_equal(told, expected)
    unload_all(made)
