"""The runtime takes what the options of a frontend say about its router."""

from __future__ import annotations

import pytest

from dynamo_vllm.config.options import ROUTERS, FrontendOptions
from dynamo_vllm.serving.plane.router_config import queue_seconds, router_config


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_name_is_one_of_the_runtime(router: str) -> None:
    assert router_config(FrontendOptions(router=router)) is not None


def test_runtime_takes_the_limit_of_local_prefill() -> None:
    assert router_config(FrontendOptions(local_prefill_tokens=64)) is not None


@pytest.mark.parametrize("policy", ["fcfs", "wspt"])
def test_runtime_knows_the_orders_of_the_queue(policy: str) -> None:
    options = FrontendOptions(router_queue_policy=policy, router_queue_seconds=0.5)
    assert router_config(options) is not None


def test_requests_that_are_to_be_refused_are_not_held_back() -> None:
    assert queue_seconds(FrontendOptions(router_queue_seconds=0.5)) == 0.5
    assert queue_seconds(FrontendOptions(router_queue_seconds=0.5, busy_prefill_tokens=1000)) == 0
