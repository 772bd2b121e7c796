"""Which of several prefill and decode workers the frontend chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.stack import Stack, stack
from runtime.conftest import another_frontend, fake

REQUESTS = "dynamo_component_requests_total"
LOST = "dynamo_component_kv_transfers_lost_total"
LOCAL = 10
"""Tokens that a prefill worker leaves to the one that answers."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stack]:
    """A decode and a prefill worker, and a frontend as it is without flags."""
    with stack(tmp_path_factory.mktemp("pair")) as made:
        made.start_frontend()
        start(made, model, "decode", "prefill")
        yield made.wait_ready().wait_over_two(length=2 * LOCAL)


def start(made: Stack, model: Path, *roles: str) -> None:
    for role in roles:
        local = ("--local-prefill-tokens", str(LOCAL)) if role == "prefill" else ()
        made.start_worker(*fake(model), "--connector", "nixl", "--disaggregation-mode", role, *local)


def who(deployment: Stack, prompt: list[int]) -> dict[str, int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "nvext": {"extra_fields": ["worker_id"]}}
    found: dict[str, int] = deployment.post("/v1/completions", body).json()["nvext"]["worker_id"]
    return found


def test_continued_prompt_skips_the_prefill_worker(pair: Stack) -> None:
    """A fresh one does not, however short. The fake engine has no KV events: past choices stand for them."""
    decode, prefill = pair.workers
    fresh, short = list(range(100, 500)), list(range(10, 24))
    little_more, much_more = [*fresh, *range(40)], [*fresh, *range(160)]
    words = ("--local-prefill-tokens", "64", "--no-kv-events")
    with another_frontend(pair, *words, name="frontend2") as made:
        made.wait_over_two(length=2 * LOCAL)
        answered, computed = decode.metric(REQUESTS), prefill.metric(REQUESTS)
        went = ["prefill_worker_id" in who(made, prompt) for prompt in (fresh, little_more, much_more, short)]
    assert went == [True, False, True, True]
    assert decode.metric(REQUESTS) - answered == 4
    assert prefill.metric(REQUESTS) - computed == 3


def test_short_prompt_is_computed_where_it_is_answered(pair: Stack) -> None:
    asked = {"model": "tiny", "max_tokens": 3, "nvext": {"extra_fields": ["engine_data"]}}
    lost = pair.workers[0].metric(LOST)
    short, long = (
        pair.post("/v1/completions", {**asked, "prompt": [30] * length}).json().get("nvext") or {}
        for length in (LOCAL - 1, LOCAL)
    )
    assert "engine_data" not in short and long["engine_data"] == {"decode_cached_tokens": LOCAL - 1}
    assert pair.workers[0].metric(LOST) == lost


def test_router_of_the_frontend_chooses_prefill_workers_too(pair: Stack, model: Path) -> None:
    """The last test of this file: it adds another pair."""
    start(pair, model, "decode", "prefill")
    with another_frontend(pair, "--router", "round-robin", name="frontend3") as made:
        made.wait_over_two(length=2 * LOCAL)
        found = [who(made, [20] * 2 * LOCAL) for _ in range(6)]
    for role in ("prefill_worker_id", "decode_worker_id"):
        chosen = [workers[role] for workers in found]
        assert len(set(chosen)) == 2 and chosen == chosen[:2] * 3
