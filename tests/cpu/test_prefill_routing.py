"""Tests several prefill and decode workers: the cache decides the prefill worker, load the decode worker."""

from __future__ import annotations

from collections import Counter

import psutil
import pytest

from cpu.completions import complete, complete_all
from cpu.stacks import Start
from cpu.streams import prompt
from harness.stack import Stack
from harness.waiting import until, until_spread

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def two_and_two(start_module: Start) -> Stack:
    made = start_module.pair()
    made.add("decode")
    made.replace("prefill")
    return made.stack


def test_repeats_go_to_the_prefill_worker_that_has_them(two_and_two: Stack) -> None:
    first = until_spread(
        lambda n: complete(two_and_two, prompt(n, 640), 2), lambda answer: answer.prefill_worker, least=12
    )
    again = [complete(two_and_two, prompt(number, 640), 2) for number in range(len(first))]
    assert [answer.prefill_worker for answer in again] == [answer.prefill_worker for answer in first]
    assert {answer.not_computed for answer in [*first, *again]} == {640}, "decode computed nothing"
    assert {answer.cached for answer in first} == {0}, "the prefill workers had nothing"
    assert all(answer.cached >= 608 for answer in again), "the prefill workers had all but the last block"


def test_hand_over_stays_on_this_machine(two_and_two: Stack) -> None:
    """Our settings do this; by default NIXL listens on every interface."""
    workers = [psutil.Process(worker.pid) for worker in two_and_two.workers]
    engines = [engine for worker in workers for engine in worker.children(recursive=True)]
    sockets = [found for engine in engines for found in engine.net_connections("tcp")]
    heard = {found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN}
    assert len(engines) >= 4 and heard == {"127.0.0.1"}


def test_load_spreads_over_decode_workers(two_and_two: Stack) -> None:
    """They publish no KV events, and the router must still not stay with one worker."""
    answers = complete_all(two_and_two, [prompt(100 + number, 200) for number in range(32)], 40)
    prefills = Counter(answer.prefill_worker for answer in answers)
    decodes = Counter[int | None](answer.worker for answer in answers)
    assert min(prefills.values()) >= 4 and min(decodes.values()) >= 4
    assert len(prefills | decodes) == 4


@pytest.mark.long
def test_continued_conversation_stays_with_its_decode_worker(start: Start, one_worker: Stack) -> None:
    pair = start.pair("--kv-events", frontend=("--local-prefill-tokens", "256"))
    pair.add("decode")
    made, turn = pair.stack.wait_ready(120), prompt(1, 400)
    first = complete(made, turn, 2)
    assert first.prefill_worker is not None and first.cached == 400
    until("the router to know the cache", lambda: complete(made, turn, 2).prefill_worker is None)
    for number in range(2, 6):
        turn = [*turn, *prompt(number, 33)]
        answer = complete(made, turn, 12)
        assert (answer.prefill_worker, answer.worker) == (None, first.worker)
        assert answer.cached >= 384
        assert answer.text == complete(one_worker, turn, 12).text
    much_more = complete(made, [*turn, *prompt(9, 300)], 2)
    assert much_more.prefill_worker is not None and much_more.cached == len(turn) + 300
