"""Tests KV events at an address that the user chose: they reach the router, with a topic and of ranks."""

from __future__ import annotations

import json

import pytest

from cpu.ranks import TWO_RANKS, assert_repeats_hit
from cpu.stacks import Start, assert_events_reach_the_router
from harness import listening
from harness.processes import free_port

pytestmark = pytest.mark.more


def with_topic(port: int) -> tuple[str, ...]:
    """Returns vLLM's own flag, as launch scripts of upstream write it."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
    return "--kv-events-config", json.dumps({**config, "endpoint": f"tcp://*:{port}"})


@pytest.mark.parametrize("way", ["config", "variable"])
def test_events_at_a_port_of_the_user(start: Start, way: str) -> None:
    port = free_port()
    env = {"DYN_VLLM_KV_EVENT_PORT": str(port)} if way == "variable" else {}
    made = start(*(with_topic(port) if way == "config" else ()), env=env)
    assert port in {one.port for one in listening.listeners(made.pids())}
    assert made.workers[0].metric("dynamo_component_kv_event_publishers") == 1
    assert_events_reach_the_router(made)


def test_events_of_ranks_with_a_topic(start: Start) -> None:
    """vLLM adds the rank to the port."""
    made = start(*TWO_RANKS, *with_topic(free_port()))
    assert made.workers[0].metric("dynamo_component_kv_event_publishers") == 2
    assert_events_reach_the_router(made)
    assert_repeats_hit(made, {0, 1})
