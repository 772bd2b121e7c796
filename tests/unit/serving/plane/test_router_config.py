"""The runtime takes what the options of a frontend say about its router."""

from __future__ import annotations

import pytest

from dynamo_vllm.config.options import ROUTERS, FrontendOptions
from dynamo_vllm.serving.plane.router_config import router_config


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_name_is_one_of_the_runtime(router: str) -> None:
    assert router_config(FrontendOptions(router=router)) is not None


def test_runtime_takes_the_limit_of_local_prefill() -> None:
    assert router_config(FrontendOptions(local_prefill_tokens=64)) is not None


@pytest.mark.parametrize("policy", ["fcfs", "wspt"])
def test_runtime_knows_the_orders_of_the_queue(policy: str) -> None:
    assert router_config(FrontendOptions(router_queue_policy=policy)) is not None


def test_runtime_takes_a_router_without_a_queue() -> None:
    assert router_config(FrontendOptions(router_queue_seconds=0)) is not None
