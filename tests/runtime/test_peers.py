"""Prefill and decode workers that do not fit each other: the later one is refused, and both say why."""

from __future__ import annotations

from functools import partial

from harness.stack import Stack, Worker
from harness.waiting import until
from runtime.conftest import StartFake

PREFILL = ("--disaggregation-mode", "prefill", "--connector", "nixl")
DECODE = ("--disaggregation-mode", "decode", "--connector", "nixl")
ASK = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 3}


def test_a_worker_that_does_not_fit_is_refused_on_both_logs(deployment: Stack, start_fake: StartFake) -> None:
    decode = start_fake(*DECODE, block_size=32)
    until("the decode worker", decode.is_ready)
    refused = start_fake(*PREFILL, block_size=64)
    assert refused.process.wait(60) == 2
    assert "block_size is 64 here and 32 there" in refused.log.read_text()
    until("a line in the other log", lambda: "block_size is 32 here and 64 there" in decode.log.read_text())
    assert deployment.post("/v1/completions", ASK).status_code == 200, "the first goes on serving"
    deployment.workers.remove(refused)
    for words in (PREFILL, DECODE):  # another model is nobody's business, and those two fit
        start_fake(*words, "--served-model-name", "other", "--component", "other", block_size=64)
    deployment.wait_ready().wait_listed("tiny", "other").wait_over_two("other")


def has_ended(workers: list[Worker]) -> bool:
    return any(worker.process.poll() is not None for worker in workers)


def test_of_two_that_come_at_once_exactly_one_is_refused(deployment: Stack, start_fake: StartFake) -> None:
    for _ in range(2):
        pair = [start_fake(*DECODE, block_size=32), start_fake(*PREFILL, block_size=64)]
        until("one of them to end", partial(has_ended, pair))
        (left,) = [worker for worker in pair if worker.process.poll() is None]
        until("the other to serve", left.is_ready)
        left.signal(15)
        assert left.process.wait(60) == 0
