"""What workers did on a verb, in words."""

from __future__ import annotations

from typing import Any

from dynamo_vllm.admin.verbs import VERBS
from dynamo_vllm.observe import verbs
from dynamo_vllm.serving.admin import client as admin_client


def test_reply_in_words() -> None:
    ranks = [{"tier_tokens": 3, "prompt_tokens": 4, "is_same": True}] * 2
    replies: list[tuple[str, dict[str, Any], str]] = [
        ("load_lora", {"seconds": 1.24, "rank": 8, "bytes": 1234567}, "loaded in 1.2 s, rank 8, 1.2 MB"),
        ("load_lora", {"already_loaded": True}, "already loaded"),
        ("sleep", {"seconds": 0.31, "freed_bytes": 41.7e9}, "asleep after 0.3 s, 41.7 GB freed"),
        ("sleep", {"seconds": 0.31, "freed_bytes": None}, "asleep after 0.3 s"),
        ("sleep", {"already": True}, "already asleep"),
        ("wake_up", {"seconds": 2, "already": False}, "awake after 2.0 s"),
        ("wake_up", {"already": True}, "already awake"),
        ("pause", {}, "paused"),
        ("pause", {"already": True}, "already paused"),
        ("resume", {}, "resumed"),
        ("resume", {"already": True}, "was not paused"),
        ("stop_profile", {"folder": "/p"}, "profile in /p"),
        ("stop_profile", {}, "profile written"),
        ("prove_tiers", {"ranks": ranks}, "6 of 8 prompt tokens came from its tiers, with the same answer"),
    ]
    for verb, reply, text in replies:
        assert verbs.said(verb, {"status": "success", **reply}) == text
    assert set(verbs.DONE) | {"status"} == set(VERBS)


def test_worker_without_an_answer_is_not_said_to_refuse() -> None:
    reply = admin_client.failure("no_answer", "no answer within 5 s", 504)
    assert verbs.said("wake_up", reply) == "no answer within 5 s"


def test_time_for_running_requests_comes_on_top() -> None:
    usual = admin_client.SECONDS["sleep"]
    assert verbs.seconds_for("sleep", {"drain_seconds": 5}) == usual + 5
    assert verbs.seconds_for("sleep", {"drain_seconds": 5}, 2.0) == 2.0
    assert verbs.seconds_for("sleep", {}) is None
