"""Tests two data-parallel ranks in one worker: each has its own routing, metrics and health checks."""

from __future__ import annotations

import signal

import httpx
import psutil
import pytest

from cpu.completions import complete, texts
from cpu.pairs import caller, request
from cpu.ranks import QUICK_WATCH, TWO_RANKS, assert_repeats_hit, core, expected_texts, stream_on_each
from cpu.stacks import Start
from cpu.streams import prompt
from harness import listening, metrics
from harness.processes import survivors
from harness.stack import Stack
from harness.waiting import Promptness, until


@pytest.fixture(scope="module")
def two_ranks(start_module: Start) -> Stack:
    return start_module(*TWO_RANKS)


@pytest.fixture
def fresh(start: Start) -> Stack:
    return start(*TWO_RANKS, *QUICK_WATCH)


def test_repeats_go_to_the_warm_rank_and_answers_are_those_of_one_engine(
    two_ranks: Stack, one_worker: Stack
) -> None:
    assert texts(assert_repeats_hit(two_ranks, {0, 1})) == expected_texts(one_worker)


def test_events_are_for_this_machine_only(two_ranks: Stack, embeds_worker: Stack, event_port: int) -> None:
    """vLLM's KV events contain the token ids of prompts."""
    for made in (two_ranks, embeds_worker):
        complete(made, prompt(77, 640))
        until("loopback only", lambda made=made: listening.for_other_machines(made.pids()) == [])  # type: ignore[misc]
    assert event_port in {one.port for one in listening.listeners(embeds_worker.pids())}


def test_figures_of_each_rank(two_ranks: Stack, one_worker: Stack) -> None:
    worker, blocks = two_ranks.workers[0], "dynamo_component_total_blocks"
    one = one_worker.workers[0].metric(blocks)
    assert [worker.metric(blocks, dp_rank=rank) for rank in (0, 1)] == [one, one]
    seen: set[tuple[str, int]] = set()

    def all_were_seen() -> bool:
        """Streams may end before a slow machine has looked at all figures; new ones are started then."""
        with stream_on_each(two_ranks, 1500):
            page = httpx.get(f"{worker.system_url}/metrics", timeout=60).text
        for name in ("dynamo_component_requests_running", "dynamo_component_active_blocks"):
            seen.update((name, rank) for rank in (0, 1) if metrics.total(page, name, dp_rank=rank) >= 1)
        return len(seen) == 4

    until("the figures of both ranks", all_were_seen, seconds=300)


def test_unknown_rank_is_refused_and_each_known_one_answers(two_ranks: Stack) -> None:
    made = [two_ranks.workers[0].metric("vllm:generation_tokens_total", engine=rank) for rank in (0, 1)]
    with caller(two_ranks) as plane:
        refused, *answered = (
            plane.call("backend.generate", request([20, 21], 2, routing={"dp_rank": rank}))
            for rank in (2, 0, 1)
        )
    assert "dp_rank: 2 is unknown; this worker has 0 to 1" in refused["error"]
    assert [sum(len(chunk["token_ids"]) for chunk in answer["chunks"]) for answer in answered] == [2, 2]
    for rank, before in enumerate(made):
        assert two_ranks.workers[0].metric("vllm:generation_tokens_total", engine=rank) >= before + 2


def test_client_gone_frees_either_rank(two_ranks: Stack) -> None:
    freed = Promptness()
    for _ in range(5):
        with stream_on_each(two_ranks, 1900):
            pass
        freed.until("two empty ranks", lambda: two_ranks.workers[0].busy() == 0)
    freed.assert_within(1.0)


@pytest.mark.long
def test_stopped_rank_takes_the_worker_out_of_service_while_the_other_works(fresh: Stack) -> None:
    worker, stopped = fresh.workers[0], core(fresh.workers[0], 1)
    stopped.suspend()
    with_output = worker.metric("vllm:generation_tokens_total", engine=0)
    until("not ready", lambda: not worker.is_ready() and fresh.get("/health").status_code == 503)
    until(
        "rank 0 answering its canary",
        lambda: worker.metric("vllm:generation_tokens_total", engine=0) > with_output,
    )
    assert not worker.is_ready()
    assert "rank 1 of the engine produced no output" in worker.log.read_text()
    stopped.resume()
    until("ready again", lambda: worker.is_ready() and fresh.get("/health").status_code == 200)
    assert complete(fresh, prompt(1, 640)).tokens == 8


def test_killed_worker_takes_its_ranks_and_coordinator_along(fresh: Stack) -> None:
    worker = fresh.workers[0]
    below = psutil.Process(worker.pid).children(recursive=True)
    worker.signal(signal.SIGKILL)
    assert survivors(below) == []


def test_killed_rank_ends_the_worker_and_all_that_belongs_to_it(two_ranks: Stack) -> None:
    """This test must be last."""
    worker = two_ranks.workers[0]
    below = psutil.Process(worker.pid).children(recursive=True)
    assert len(below) >= 3, "two engine cores and vLLM's coordinator"
    core(worker, 1).kill()
    assert worker.process.wait(60) == 3
    until("the model to go", lambda: two_ranks.models() == [])
    assert survivors(below) == []
