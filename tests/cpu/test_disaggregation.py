"""Tests prefill and decode in two engines over NIXL: the answers equal those of one engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cpu.completions import PATH, body, complete, complete_all, texts
from cpu.pairs import IN_FLIGHT, LOST, NIXL, ROUNDS, Pairs, prompt, prompts
from harness import listening
from harness.otlp import Receiver
from harness.stack import Stack
from harness.waiting import Promptness, until

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROLES = ("dynamo-vllm-prefill", "dynamo-vllm-decode")
OURS, VLLMS = "worker.generate", "llm_request"


def assert_equal_and_nothing_computed_twice(made: Pairs, alone: Stack, every: list[list[int]]) -> None:
    answers = complete_all(made.stack, every, 12)
    assert texts(answers) == texts(complete_all(alone, every, 12))
    # The last token of a prompt is always computed: its output is the answer's first.
    assert all(a.not_computed >= len(prompt) - 1 for a, prompt in zip(answers, every, strict=True))
    for worker in made.decodes:
        assert worker.metric(LOST) == 0


def test_answers_equal_one_engine_and_nothing_is_computed_twice(pair: Pairs, one_worker: Stack) -> None:
    assert_equal_and_nothing_computed_twice(pair, one_worker, prompts(24, 1500))


def test_prefill_and_decode_listen_for_this_machine_only(pair: Pairs) -> None:
    complete(pair.stack, prompts(1, 100)[0])
    until("loopback only", lambda: listening.for_other_machines(pair.stack.pids()) == [])


@pytest.mark.parametrize(
    "more",
    [{"n": 2, "seed": 7, "temperature": 0.8}, {"logprobs": 2}, {"stop": ["a"]}, {"prompt_logprobs": 1}],
)
def test_options_equal_one_engine(pair: Pairs, one_worker: Stack, more: dict[str, Any]) -> None:
    answer, expected = (complete(made, prompts(3, 300)[2], 12, **more) for made in (pair.stack, one_worker))
    assert answer.texts == expected.texts
    if "prompt_logprobs" in more:
        told = [[list(at or ()) for at in each.prompt_logprobs] for each in (answer, expected)]
        assert told[0] == told[1]


def test_repeated_prompt_is_fetched_from_the_own_cache(pair: Pairs) -> None:
    every = prompts(6, 700, seed=8)
    assert texts(complete_all(pair.stack, every, 12)) == texts(complete_all(pair.stack, every, 12))


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"logprobs": 1}, marks=pytest.mark.long)], ids=["direct egress", "the long way"]
)
def test_engines_trace_what_they_did_below_the_workers_span(
    pair: Pairs, spans: Receiver, more: dict[str, int]
) -> None:
    trace = TRACE[:-1] + str(len(more))
    headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
    assert pair.stack.post(PATH, body(prompt(300), 6, **more), headers=headers).status_code == 200
    wanted = [(role, name) for role in ROLES for name in (OURS, VLLMS)]
    told = spans.wait(trace, *wanted, ("dynamo-vllm-frontend", "http-request"))
    tokens = []
    for role in ROLES:
        (ours,) = [span for span in told if (span.service, span.name) == (role, OURS)]
        (engines,) = [span for span in told if (span.service, span.name) == (role, VLLMS)]
        assert engines.parent == ours.span
        for figure in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode"):
            assert engines.attributes[f"gen_ai.latency.{figure}"] >= 0
        tokens.append(engines.attributes["gen_ai.usage.completion_tokens"])
    assert tokens == [1, 6]


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
            leaving = pool.submit(ask_until_closed, client, pair.stack.url + PATH)
            until(f"work of the {moment}", lambda: busy.metric(IN_FLIGHT) > 0)
            client.close()
            leaving.exception(30)
        freed.until("empty engines", lambda: all(worker.busy() == 0 for worker in pair.stack.workers))
    freed.assert_within(1.0)
    assert pair.is_alive()
    assert complete(pair.stack, prompt(40)).finishes == ["length"]


def ask_until_closed(client: httpx.Client, url: str) -> None:
    """Asks repeatedly: one request may end before anybody has seen it."""
    while True:
        with client.stream("POST", url, json=body(prompt(1500), 200, stream=True)) as answer:
            for _ in answer.iter_lines():
                pass
