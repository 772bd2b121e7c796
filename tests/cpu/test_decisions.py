"""Tests that the console's view of routing is what happened, with real engines whose caches change."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from cpu.stacks import Start
from cpu.streams import prompt
from dynamo_vllm.console.decisions.service import short_name
from harness import decisions, kv_events
from harness.decisions import Answer, Follower
from harness.otlp import Receiver
from harness.stack import Stack
from harness.waiting import until

REQUESTS, AT_ONCE, BLOCK = 100, 4, 32
SHARED = 12


@pytest.fixture
def followed(
    start: Start, spans: Receiver, request: pytest.FixtureRequest
) -> Iterator[tuple[Stack, Follower]]:
    """Two workers, whose own processes tell a receiver of spans what they got."""
    url, flags = decisions.trace_url(), ("--kv-events", "--otlp-endpoint", spans.grpc, *request.param)
    tracing = {**decisions.SELECTED, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    made = start(*flags, workers=2, frontend=("--request-trace-url", url), settings=tracing)
    with decisions.follower(made, url) as follower:
        until("both caches are known", lambda: follower.is_sure(2))
        yield made, follower


def waves() -> list[list[tuple[list[int], int]]]:
    """Requests that share beginnings with earlier ones, and not with those at the same time.

    Else an engine may find more cached than the router, which chose before the other request computed it.
    """
    made = random.Random(3)
    found = []
    for _ in range(REQUESTS // AT_ONCE):
        beginnings = iter(made.sample(range(SHARED), AT_ONCE))

        def begin(ends: random.Random, beginnings: Iterator[int] = beginnings) -> list[int]:
            return prompt(next(beginnings), 8 * BLOCK)[: ends.randrange(9) * BLOCK]

        found.append(decisions.prompts(AT_ONCE, BLOCK, begin, 8, made))
    return found


def whole_blocks(prompt: Sequence[int], max_tokens: int, answer: Answer) -> set[tuple[object, ...]]:
    """Names the blocks that its worker must have: those of the prompt, which another may share, and its own.

    The last token is not computed.
    """
    whole, every = (tokens // BLOCK for tokens in (len(prompt), len(prompt) + max_tokens - 1))
    shared = {(answer.worker, *prompt[: number * BLOCK]) for number in range(1, whole + 1)}
    return shared | {(answer.id, number) for number in range(whole, every)}


def wait_until_known(followed: tuple[Stack, Follower], blocks: int) -> None:
    """Waits until workers have said that they have so many blocks, and the router has heard it."""
    made, follower = followed
    until("events of all blocks", lambda: follower.blocks() >= blocks)
    until("all of them at the router", lambda: kv_events.heard(made) >= kv_events.said(made))


@pytest.mark.parametrize(
    ("followed", "keeps_all"),
    [
        pytest.param((), True, id="caches grow"),
        pytest.param(
            ("--num-gpu-blocks-override", "66"), False, id="blocks are evicted", marks=pytest.mark.long
        ),
    ],
    indirect=["followed"],
)
def test_every_decision_is_the_one_that_was_made(
    followed: tuple[Stack, Follower], spans: Receiver, keeps_all: bool
) -> None:
    """Where blocks are evicted, an engine may have lost some since the router chose."""
    made, follower = followed
    answers: list[Answer] = []
    blocks: set[tuple[object, ...]] = set()
    for wave in waves():
        ended = decisions.ask_all(made, wave, AT_ONCE)
        answers += ended
        for asked, answer in zip(wave, ended, strict=True):
            blocks |= whole_blocks(*asked, answer)
        if keeps_all:  # else an engine may find more than the router has heard of
            wait_until_known(followed, len(blocks))
    told = decisions.details(follower, answers)
    ids = {answer.id for answer in answers}
    until("spans of all requests", lambda: ids <= decisions.served(spans.file).keys())
    served, costs = decisions.served(spans.file), decisions.logits(made.folder / "frontend.log")
    wrong = []
    for answer in answers:
        (decision,) = told[answer.id]["decisions"]
        one = decisions.chosen(decision)
        cached = one["overlap"]["device"] * BLOCK
        seen = {
            "worker": {one["worker"]} == {short_name(instance) for instance in served[answer.id]},
            "router's overlap": one["overlap"]["device"] == answer.router_blocks(BLOCK),
            "engine's cached tokens": not keeps_all or cached == answer.engine_cached,
            "candidates": len(decision["candidates"]) == 2,
            "cost": not decision["exact"] or abs(one["cost"] - costs[answer.id, "decode"]) < 0.01,
        }
        wrong += [(name, one, answer, decision) for name, is_right in seen.items() if not is_right]
    assert wrong == [], len(wrong)
    overlapping = [d for d in told.values() if decisions.chosen(d["decisions"][0])["overlap"]["device"]]
    assert len(overlapping) >= REQUESTS / 4  # else it shows little
