"""Tests several prefill and decode workers: the cache decides the prefill worker, load the decode worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cpu.pairs import not_computed
from harness.stack import Stack, stack
from harness.waiting import until, until_spread
from harness.warm import Zygote

pytestmark = pytest.mark.more

ROLE = ("--connector", "nixl", "--disaggregation-mode")


def start(warm: Zygote, made: Stack, model: Path, prefill: int, decode: int, *decode_flags: str) -> Stack:
    for _ in range(decode):
        warm.start_worker(made, model, *ROLE, "decode", *decode_flags)
    for _ in range(prefill):
        warm.start_worker(made, model, *ROLE, "prefill")
    return made.wait_ready(120).wait_over_two()


@pytest.fixture(scope="module")
def two_and_two(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("two-and-two")) as made:
        made.start_frontend()
        yield start(warm, made, model, 2, 2)


def prompt(number: int, length: int) -> list[int]:
    return [10 + (number * 97 + i * 13 + i * i % 7) % 850 for i in range(length)]


def ask(made: Stack, ids: list[int], max_tokens: int = 2) -> Any:
    return made.openai.completions.create(
        model="tiny",
        prompt=ids,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"nvext": {"extra_fields": ["worker_id", "engine_data"]}, "ignore_eos": True},
    )


def prefill_of(answer: Any) -> int | None:
    found: int | None = answer.model_extra["nvext"]["worker_id"].get("prefill_worker_id")
    return found


def decode_of(answer: Any) -> int:
    return int(answer.model_extra["nvext"]["worker_id"]["decode_worker_id"])


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_repeats_go_to_the_prefill_worker_that_has_them(two_and_two: Stack) -> None:
    first = until_spread(lambda number: ask(two_and_two, prompt(number, 640)), prefill_of, least=12)
    again = [ask(two_and_two, prompt(number, 640)) for number in range(len(first))]
    assert [prefill_of(answer) for answer in again] == [prefill_of(answer) for answer in first]
    assert {not_computed(answer) for answer in [*first, *again]} == {640}, "decode computed nothing"
    assert {cached(answer) for answer in first} == {0}, "the prefill workers had nothing"
    assert all(cached(answer) >= 608 for answer in again), "the prefill workers had all but the last block"


def test_hand_over_stays_on_this_machine(two_and_two: Stack) -> None:
    """Our settings do this; by default NIXL listens on every interface."""
    workers = [psutil.Process(worker.pid) for worker in two_and_two.workers]
    engines = [engine for worker in workers for engine in worker.children(recursive=True)]
    sockets = [found for engine in engines for found in engine.net_connections("tcp")]
    heard = {found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN}
    assert len(engines) >= 4 and heard == {"127.0.0.1"}


def test_load_spreads_over_decode_workers(two_and_two: Stack) -> None:
    """They publish no KV events, and the router must still not stay with one worker."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask(two_and_two, prompt(100 + n, 200), 40), range(32)))
    for role in (prefill_of, decode_of):
        assert min(Counter(map(role, answers)).values()) >= 4, role.__name__
    assert len({role(answer) for answer in answers for role in (prefill_of, decode_of)}) == 4


@pytest.mark.long
def test_continued_conversation_stays_with_its_decode_worker(
    warm: Zygote, model: Path, tmp_path: Path, one_worker: Stack
) -> None:
    with stack(tmp_path) as made:
        made.start_frontend("--local-prefill-tokens", "256")
        start(warm, made, model, 1, 2, "--kv-events")
        turn = prompt(1, 400)
        first = ask(made, turn)
        assert prefill_of(first) is not None and cached(first) == 400
        until("the router to know the cache", lambda: prefill_of(ask(made, turn)) is None)
        for number in range(2, 6):
            turn = [*turn, *prompt(number, 33)]
            answer = ask(made, turn, 12)
            assert (prefill_of(answer), decode_of(answer)) == (None, decode_of(first))
            assert cached(answer) >= 384
            assert answer.choices[0].text == ask(one_worker, turn, 12).choices[0].text
        much_more = ask(made, [*turn, *prompt(9, 300)])
        assert prefill_of(much_more) is not None and cached(much_more) == len(turn) + 300
