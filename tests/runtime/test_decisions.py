"""Tests that the console's view of routing is the router's own, with fake engines and the real runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.console.decisions.service import short_name
from dynamo_vllm.engine.fake.cached_blocks import BLOCKS_PER_SEQUENCE, sequence
from dynamo_vllm.engine.fake.spec import CachedBlocks
from harness import decisions
from harness.decisions import Answer, Follower
from harness.otlp import receiver
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import another_frontend, fake

BLOCK, REQUESTS = 32, 120
SYNC = "--router-replica-sync"


def start(made: Stack, model: Path, cached: list[dict[str, Any]], *flags: str, **more: Any) -> None:
    spec = {"block_size": BLOCK, "cached": cached, "token_ms": 2, "prefill_ms": 10, **more}
    made.start_worker(*fake(model, **spec), *flags)


def start_three(made: Stack, model: Path) -> None:
    """Each has a third of 60 sequences; two have the first 30 in lower tiers too."""
    below = {0: "CPU", 1: "STORAGE"}
    for number in range(3):
        cached: list[dict[str, Any]] = [{"count": 20 * BLOCKS_PER_SEQUENCE, "first": number, "step": 3}]
        if number in below:
            cached.append({"count": 30 * BLOCKS_PER_SEQUENCE, "medium": below[number]})
        start(made, model, cached)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stack]:
    """Workers for a frontend of each test: what they have cached does not change."""
    with stack(tmp_path_factory.mktemp("three")) as made:
        start_three(made, model)
        yield made


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("pairs")) as made:
        for number, role in enumerate(("prefill", "prefill", "decode", "decode")):
            every = {"count": 20 * BLOCKS_PER_SEQUENCE, "first": number, "step": 2}
            cached = [every] if role == "prefill" else []
            start(made, model, cached, "--connector", "nixl", "--disaggregation-mode", role)
        yield made


def shared(sequences: int) -> Any:
    return lambda made: sequence(CachedBlocks(count=1), made.randrange(sequences), made.randrange(15) * BLOCK)


def counted(overlap: dict[str, int]) -> float:
    return overlap["device"] + 0.75 * overlap["host"] + 0.25 * overlap["disk"]


def assert_chosen(answers: list[Answer], told: dict[str, dict[str, Any]]) -> None:
    """Worker and overlap of every decision are the router's."""
    wrong = []
    for answer in answers:
        one = decisions.chosen(told[answer.id]["decisions"][0])
        is_right = one["worker"] == short_name(answer.prefill_worker)
        if not is_right or abs(counted(one["overlap"]) - answer.router_blocks(BLOCK)) > 0.01:
            wrong.append((answer, one))
    assert wrong == [], len(wrong)


def costs_that_differ(
    answers: list[Answer], told: dict[str, dict[str, Any]], log: Path, number: int = 0, kind: str = "decode"
) -> tuple[list[Any], list[Any]]:
    """Decisions whose cost is not the one that the router logged: all, and those said to be exact."""
    logged = decisions.logits(log)
    found = []
    for answer in answers:
        decision = told[answer.id]["decisions"][number]
        one = decisions.chosen(decision)
        if abs(one["cost"] - logged[answer.id, kind]) > 0.01:
            found.append((logged[answer.id, kind], decision))
    return found, [one for one in found if one[1]["exact"]]


@pytest.fixture
def followed(three: Stack, request: pytest.FixtureRequest) -> Iterator[tuple[Stack, Follower]]:
    """Three workers; the fixture's parameter are flags of the frontend."""
    url = decisions.trace_url()
    words = ("--request-trace-url", url, *request.param)
    with (
        another_frontend(three, *words, **decisions.SELECTED) as made,
        decisions.follower(made, url) as follower,
    ):
        until("all caches are known", lambda: follower.is_sure(3))
        yield made, follower


@pytest.mark.parametrize("followed", [()], indirect=True, ids=["records"])
def test_decisions_follow_from_records(followed: tuple[Stack, Follower]) -> None:
    """Without the frontends' bookings, loads are worked out afterwards: what is called exact must be."""
    made, follower = followed
    answers = decisions.ask_all(made, decisions.prompts(REQUESTS, BLOCK, shared(70)), 4)
    told = decisions.details(follower, answers)
    assert_chosen(answers, told)
    differ, wrong = costs_that_differ(answers, told, made.folder / "frontend.log")
    assert wrong == []
    assert len(differ) < REQUESTS / 4
    overlaps = [decisions.chosen(one["decisions"][0])["overlap"] for one in told.values()]
    assert any(one["host"] for one in overlaps) or any(one["disk"] for one in overlaps)
    alone = decisions.ask(made, sequence(CachedBlocks(count=1), 1, 8 * BLOCK), 2)
    (decision,) = decisions.details(follower, [alone])[alone.id]["decisions"]
    assert decision["exact"], decision  # nothing else happened near it
    caches = follower.wait_for(lambda one: one.caches())
    assert (caches["block_size"], len(caches["workers"]), caches["tree"]["left_out"]) == (BLOCK, 3, 0)
    assert sum(node["used"] for node in caches["tree"]["nodes"]) > REQUESTS / 3


@pytest.mark.parametrize("followed", [(SYNC,)], indirect=True, ids=["bookings"])
def test_decisions_are_exact_with_bookings(followed: tuple[Stack, Follower]) -> None:
    made, follower = followed
    answers = decisions.ask_all(made, decisions.prompts(REQUESTS, BLOCK, shared(70)), 8)
    told = decisions.details(follower, answers)
    assert_chosen(answers, told)
    differ, wrong = costs_that_differ(answers, told, made.folder / "frontend.log")
    assert len(differ) <= REQUESTS / 10, differ  # a request ended between choosing and booking
    assert wrong == []
    assert sum(one["decisions"][0]["exact"] for one in told.values()) > REQUESTS / 2


@pytest.mark.parametrize("flags", [(), (SYNC,)], ids=["records", "bookings"])
def test_prefill_and_decode(pairs: Stack, flags: tuple[str, ...]) -> None:
    url, count = decisions.trace_url(), REQUESTS // 2
    with (
        another_frontend(pairs, "--request-trace-url", url, *flags, **decisions.SELECTED) as made,
        decisions.follower(made, url) as follower,
    ):
        made.wait_over_two()
        until("the caches of prefill workers are known", lambda: follower.is_sure(2))
        answers = decisions.ask_all(made, decisions.prompts(count, BLOCK, shared(50)), 6)
        told = decisions.details(follower, answers)
    assert_chosen(answers, told)
    for answer in answers:
        one = told[answer.id]
        assert [each["phase"] for each in one["decisions"]] == ["prefill", "decode"]
        assert decisions.chosen(one["decisions"][1])["worker"] == short_name(answer.worker)
        assert [len(each["candidates"]) for each in one["decisions"]] == [2, 2]
        assert "transfer" in [part["what"] for part in one["timeline"]]
    for number, kind in enumerate(("prefill", "decode")):
        differ, wrong = costs_that_differ(answers, told, pairs.folder / "frontend.log", number, kind)
        assert wrong == []
        assert len(differ) <= (count / 10 if flags else count / 4), differ


def test_frontend_keeps_the_operators_own_export(three: Stack, tmp_path: Path) -> None:
    """With --otlp-endpoint its log lines and spans go there, and nothing to the console."""
    url = decisions.trace_url()
    with receiver(tmp_path) as at:
        words = ("--request-trace-url", url, "--otlp-endpoint", at.http, "--otlp-protocol", "http/protobuf")
        with (
            another_frontend(three, *words, OTEL_BSP_SCHEDULE_DELAY="200") as made,
            decisions.follower(made, url) as follower,
        ):
            decisions.ask(made, [20] * 40, 2)
            until("its span", lambda: any(span.name == "http-request" for span in at.spans()))
            assert follower.ask(lambda one: one.requests())["requests"] == []
