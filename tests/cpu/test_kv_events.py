"""Tests KV events at an address that the user chose: they reach the router, with a topic and of ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cpu.ranks import assert_repeats_hit
from harness import listening
from harness.processes import COMMAND, free_port
from harness.stack import Stack, stack
from harness.warm import Zygote

pytestmark = pytest.mark.more


def with_topic(port: int) -> tuple[str, ...]:
    """Returns vLLM's own flag, as launch scripts of upstream write it."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
    return "--kv-events-config", json.dumps({**config, "endpoint": f"tcp://*:{port}"})


def assert_events_reach_the_router(made: Stack) -> None:
    """A router with KV events knows only the caches that events reported."""
    done = subprocess.run(
        [*COMMAND, "check", "--live", made.url, "--json", "--strict"],
        env=made.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    outcomes = {step["name"]: step["outcome"] for step in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert (outcomes["kv event"], outcomes["prefix cache"]) == ("ok", "ok"), done.stdout


@pytest.mark.parametrize("way", ["config", "variable"])
def test_events_at_a_port_of_the_user(warm: Zygote, model: Path, tmp_path: Path, way: str) -> None:
    port = free_port()
    flags = with_topic(port) if way == "config" else ()
    env = {"DYN_VLLM_KV_EVENT_PORT": str(port)} if way == "variable" else {}
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *flags, env=env)
        made.wait_ready(120)
        assert port in {one.port for one in listening.listeners(made.pids())}
        assert_events_reach_the_router(made)
        assert worker.metric("dynamo_component_kv_event_publishers") == 1


def test_events_of_ranks_with_a_topic(warm: Zygote, model: Path, tmp_path: Path) -> None:
    """vLLM adds the rank to the port."""
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, "--data-parallel-size", "2", *with_topic(free_port()))
        made.wait_ready(120)
        assert worker.metric("dynamo_component_kv_event_publishers") == 2
        assert_events_reach_the_router(made)
        assert_repeats_hit(made, {0, 1})
