"""Tests faults between a prefill and a decode engine: the answer is right, or a typed error.

DYNAMO_VLLM_ROUNDS=20 repeats each fault twenty times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from cpu.pairs import IN_FLIGHT, LOST, ROUNDS, Pairs, caller, handed_over, prompt, tokens
from cpu.stacks import Start
from cpu.streams import LONG, busy_worker, streamed
from harness.plane import Plane
from harness.stack import Stack
from harness.waiting import until

pytestmark = [pytest.mark.more, pytest.mark.timeout(600 * ROUNDS)]
TYPED = (openai.InternalServerError,)  # every 5xx: the client may send the request again


@pytest.fixture(scope="module")
def pair(start_module: Start) -> Pairs:
    """Its workers are killed and replaced."""
    return start_module.pair()


@pytest.fixture(scope="module")
def plane(pair: Pairs) -> Iterator[Plane]:
    with caller(pair.stack) as made:
        yield made


@pytest.fixture(scope="module")
def alone(one_worker: Stack) -> Iterator[Plane]:
    """Returns the answer of one engine without a transfer."""
    with caller(one_worker) as made:
        yield made


def text(made: Stack, words: list[int], max_tokens: int = 60) -> str:
    return streamed(stream(made, words, max_tokens))[0]


def stream(made: Stack, words: list[int], max_tokens: int = 60) -> Any:
    return made.openai.completions.create(
        model="tiny",
        prompt=words,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )


# --- parameters that are not what the prefill worker gave -------------------------------------------------


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda p: p,
    "no parameters": lambda p: None,
    "text": lambda p: "x",
    "only the flag": lambda p: {"do_remote_prefill": True},
    "no host": lambda p: {k: v for k, v in p.items() if k != "remote_host"},
    "no port": lambda p: {k: v for k, v in p.items() if k != "remote_port"},
    "no engine": lambda p: {k: v for k, v in p.items() if k != "remote_engine_id"},
    "no request": lambda p: {k: v for k, v in p.items() if k != "remote_request_id"},
    "no blocks": lambda p: {**p, "remote_block_ids": []},
    "one block too few": lambda p: {**p, "remote_block_ids": [p["remote_block_ids"][0][:-1]]},
    "one block too many": lambda p: {**p, "remote_block_ids": [[*p["remote_block_ids"][0], 1]]},
    "blocks that do not exist": lambda p: {
        **p,
        "remote_block_ids": [[10**7 + i for i, _ in enumerate(p["remote_block_ids"][0])]],
    },
    "negative blocks": lambda p: {**p, "remote_block_ids": [[-1 for _ in p["remote_block_ids"][0]]]},
    "blocks as text": lambda p: {**p, "remote_block_ids": [["a" for _ in p["remote_block_ids"][0]]]},
    "a port nobody listens on": lambda p: {**p, "remote_port": 1},
    "a host that is not there": lambda p: {**p, "remote_host": "no.such.host.invalid"},
    "another engine": lambda p: {**p, "remote_engine_id": "another"},
    "another request": lambda p: {**p, "remote_request_id": "another"},
    "a width of 0": lambda p: {**p, "tp_size": 0},
    "a width of 8": lambda p: {**p, "tp_size": 8},
    "fewer tokens": lambda p: {**p, "remote_num_tokens": 3},
    "more tokens": lambda p: {**p, "remote_num_tokens": 99999},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_parameters(
    pair: Pairs, plane: Plane, alone: Plane, change: Callable[[dict[str, Any]], Any]
) -> None:
    asked = prompt(100)
    handed = handed_over(plane, asked)
    changed = {**handed, "kv_transfer_params": change(handed["kv_transfer_params"])}
    assert tokens(plane, asked, changed) == tokens(alone, asked)
    assert pair.is_alive()


# --- time -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_expired_lease(start: Start, alone: Plane) -> None:
    """By then the prefill engine has written other prompts into these blocks."""
    flags = ("--kv-lease-seconds", "2", "--num-gpu-blocks-override", "70", "--max-num-seqs", "8")
    short = start.pair(*flags)
    with caller(short.stack) as plane:
        for _ in range(ROUNDS):
            asked = prompt(300)
            handed = handed_over(plane, asked)
            until("the end of the lease", lambda: time.time() > handed["expires_at"])  # noqa: B023
            for _ in range(4):
                handed_over(plane, prompt(1000))
            assert tokens(plane, asked, handed) == tokens(alone, asked)
        assert short.decodes[0].metric(LOST) == ROUNDS
        assert short.is_alive()


# --- workers that are killed ------------------------------------------------------------------------------


def test_prefill_worker_killed_before_the_transfer(pair: Pairs, plane: Plane, alone: Plane) -> None:
    for _ in range(ROUNDS):
        asked = prompt(200)
        handed = handed_over(plane, asked)
        pair.kill(pair.prefills[0])
        assert tokens(plane, asked, handed) == tokens(alone, asked)
        assert pair.is_alive()
        pair.replace("prefill")


def test_prefill_worker_killed_with_requests_in_every_stage(pair: Pairs, one_worker: Stack) -> None:
    for number in range(ROUNDS):
        asked = [prompt(length) for length in (1400, 1000, 600, 200)]
        wanted = [text(one_worker, words) for words in asked]
        first = (pair.prefills, pair.decodes)[number % 2][0]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(text, pair.stack, words) for words in asked]
            until("work", lambda: first.metric(IN_FLIGHT) > 0)  # noqa: B023
            pair.kill(pair.prefills[0])
            for answer, right in zip(answers, wanted, strict=True):
                assert isinstance(answer.exception(60), TYPED) or answer.result() == right
        assert pair.is_alive()
        assert text(pair.stack, asked[0]) == wanted[0], "decode goes on alone"
        pair.replace("prefill")


def test_decode_worker_killed_in_mid_stream(pair: Pairs, one_worker: Stack) -> None:
    """The other decode worker continues with the tokens generated so far."""
    pair.replace("decode")
    for _ in range(ROUNDS):
        asked = prompt(300)
        chunks = iter(stream(pair.stack, asked, LONG))
        first = [next(chunks) for _ in range(10)]
        pair.kill(busy_worker(pair.decodes))
        assert streamed([*first, *chunks])[0] == text(one_worker, asked, LONG)
        assert pair.is_alive()
        pair.replace("decode")
