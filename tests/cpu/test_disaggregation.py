"""Tests prefill and decode in two engines over NIXL: the answers equal those of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cpu.pairs import ENGINE_DATA, NIXL, ROUNDS, Pairs, not_computed, pairs, prompt, prompts
from harness import listening
from harness.stack import Stack
from harness.waiting import Promptness, until
from harness.warm import Zygote


@pytest.fixture(scope="module")
def pair(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with pairs(warm, model, tmp_path_factory.mktemp("pair")) as made:
        yield made


def ask(made: Stack, prompt: list[int], **more: Any) -> Any:
    extra = {"ignore_eos": True, "nvext": ENGINE_DATA}
    body = {"max_tokens": 12, "temperature": 0, "extra_body": extra, **more}
    return made.openai.completions.create(model="tiny", prompt=prompt, **body)


def ask_all(made: Stack, every: list[list[int]]) -> list[Any]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: ask(made, prompt), every))


def assert_equal_and_nothing_computed_twice(made: Pairs, alone: Stack, every: list[list[int]]) -> None:
    found, wanted = ask_all(made.stack, every), ask_all(alone, every)
    assert [a.choices[0].text for a in found] == [a.choices[0].text for a in wanted]
    # The last token of a prompt is always computed: its output is the answer's first.
    assert all(not_computed(a) >= len(prompt) - 1 for a, prompt in zip(found, every, strict=True))
    for worker in made.decodes:
        assert worker.metric("dynamo_component_kv_transfers_lost_total") == 0


def test_answers_equal_one_engine_and_nothing_is_computed_twice(pair: Pairs, one_worker: Stack) -> None:
    assert_equal_and_nothing_computed_twice(pair, one_worker, prompts(24, 1500))


def test_prefill_and_decode_listen_for_this_machine_only(pair: Pairs) -> None:
    ask(pair.stack, prompts(1, 100)[0])
    until("loopback only", lambda: listening.for_other_machines(pair.stack.pids()) == [])


def test_several_choices_and_logprobs_equal_one_engine(pair: Pairs, one_worker: Stack) -> None:
    for more in ({"n": 2, "seed": 7, "temperature": 0.8}, {"logprobs": 2}, {"stop": ["a"]}):
        found, wanted = (ask(made, prompts(3, 300)[2], **more) for made in (pair.stack, one_worker))
        assert [choice.text for choice in found.choices] == [choice.text for choice in wanted.choices]


def test_logprobs_of_the_prompt_equal_one_engine(pair: Pairs, one_worker: Stack) -> None:
    body = {"model": "tiny", "prompt": prompts(3, 300)[2], "max_tokens": 1, "prompt_logprobs": 1}
    body["nvext"] = {"extra_fields": ["engine_data"]}
    found, wanted = (made.post("/v1/completions", body).json() for made in (pair.stack, one_worker))
    told = [answer["nvext"]["engine_data"]["prompt_logprobs"] for answer in (found, wanted)]
    assert [list(at or ()) for at in told[0]] == [list(at or ()) for at in told[1]]


def test_repeated_prompt_is_fetched_from_the_own_cache(pair: Pairs, one_worker: Stack) -> None:
    every = prompts(6, 700, seed=8)
    first, again = ask_all(pair.stack, every), ask_all(pair.stack, every)
    assert [a.choices[0].text for a in first] == [a.choices[0].text for a in again]


@pytest.mark.long
def test_worker_with_another_block_size_is_refused_on_both_logs(pair: Pairs) -> None:
    refused = pair.warm.start_worker(pair.stack, pair.model, *NIXL, "prefill", "--block-size", "64")
    pair.stack.workers.remove(refused)
    assert refused.process.wait(60) == 2
    assert "block_size is 64 here and 32 there" in refused.log.read_text()
    for worker in pair.stack.workers:
        assert "block_size is 32 here and 64 there" in worker.log.read_text()


@pytest.mark.parametrize("moment", ["prefill", "transfer"])
def test_client_that_leaves_empties_both_engines(pair: Pairs, moment: str) -> None:
    busy = pair.prefills[0] if moment == "prefill" else pair.decodes[0]
    freed = Promptness()
    for _ in range(5 * ROUNDS):
        with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=30) as client:
            leaving = pool.submit(ask_until_closed, client, f"{pair.stack.url}/v1/completions")
            until(f"work of the {moment}", lambda: busy.metric("dynamo_component_requests_in_flight") > 0)
            client.close()
            leaving.exception(30)
        freed.until("empty engines", lambda: all(worker.busy() == 0 for worker in pair.stack.workers))
    freed.assert_within(1.0)
    assert pair.is_alive()
    assert ask(pair.stack, prompt(40)).choices[0].finish_reason == "length"


def ask_until_closed(client: httpx.Client, url: str) -> None:
    """Asks repeatedly: one request may end before anybody has seen it."""
    while True:
        body = {"model": "tiny", "prompt": prompt(1500), "max_tokens": 200, "stream": True}
        with client.stream("POST", url, json=body) as answer:
            for _ in answer.iter_lines():
                pass
