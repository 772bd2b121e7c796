"""Which of several prefill and decode workers the frontend chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.stack import Stack, stack

REQUESTS = "dynamo_component_requests_total"
Start = Callable[..., Stack]


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    """Starts workers of these roles behind a frontend with these flags, until prefill workers are used."""
    fake = ("--model", str(model), "--served-model-name", "tiny", "--engine", "fake", "--connector", "nixl")
    with ExitStack() as made:

        def begin(*roles: str, frontend: tuple[str, ...]) -> Stack:
            deployment = made.enter_context(stack(tmp_path))
            deployment.start_frontend(*frontend)
            for role in roles:
                deployment.start_worker(*fake, "--disaggregation-mode", role)
            return deployment.wait_ready().wait_over_two()

        yield begin


def who(deployment: Stack, prompt: list[int]) -> dict[str, int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "nvext": {"extra_fields": ["worker_id"]}}
    found: dict[str, int] = deployment.post("/v1/completions", body).json()["nvext"]["worker_id"]
    return found


def test_continued_prompt_skips_the_prefill_worker(start: Start) -> None:
    """A fresh one does not, however short. The fake engine has no KV events: past choices stand for them."""
    made = start("decode", "prefill", frontend=("--local-prefill-tokens", "64", "--no-kv-events"))
    decode, prefill = made.workers
    answered, computed = decode.metric(REQUESTS), prefill.metric(REQUESTS)
    fresh, short = list(range(100, 500)), [10, 11]
    little_more, much_more = [*fresh, *range(40)], [*fresh, *range(160)]
    asked = [fresh, little_more, much_more, short]
    went = ["prefill_worker_id" in who(made, prompt) for prompt in asked]
    assert went == [True, False, True, True]
    assert decode.metric(REQUESTS) - answered == 4
    assert prefill.metric(REQUESTS) - computed == 3


def test_router_of_the_frontend_chooses_prefill_workers_too(start: Start) -> None:
    made = start("decode", "decode", "prefill", "prefill", frontend=("--router", "round-robin"))
    found = [who(made, [20, 21, 22]) for _ in range(6)]
    for role in ("prefill_worker_id", "decode_worker_id"):
        chosen = [workers[role] for workers in found]
        assert len(set(chosen)) == 2 and chosen == chosen[:2] * 3


def test_short_prompt_is_computed_where_it_is_answered(tmp_path: Path, model: Path) -> None:
    fake = ("--model", str(model), "--served-model-name", "tiny", "--engine", "fake", "--connector", "nixl")
    with stack(tmp_path) as made:
        made.start_frontend()
        decode = made.start_worker(*fake, "--disaggregation-mode", "decode")
        made.start_worker(*fake, "--disaggregation-mode", "prefill", "--local-prefill-tokens", "10")
        made.wait_ready().wait_over_two(length=20)
        asked = {"model": "tiny", "max_tokens": 3, "nvext": {"extra_fields": ["engine_data"]}}
        short, long = (
            made.post("/v1/completions", {**asked, "prompt": [30] * length}).json().get("nvext") or {}
            for length in (9, 10)
        )
        assert "engine_data" not in short and long["engine_data"] == {"decode_cached_tokens": 9}
        assert decode.metric("dynamo_component_kv_transfers_lost_total") == 0
