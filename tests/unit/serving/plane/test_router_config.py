"""The runtime takes what the options of a frontend say about its router."""

from __future__ import annotations

from dynamo_vllm.config.options import ROUTERS, FrontendOptions
from dynamo_vllm.serving.plane.router_config import queue_seconds, router_config


def test_runtime_takes_every_router_order_and_limit() -> None:
    for options in (
        *(FrontendOptions(router=router) for router in ROUTERS),
        *(FrontendOptions(router_queue_policy=order, router_queue_seconds=0.5) for order in ("fcfs", "wspt")),
        FrontendOptions(local_prefill_tokens=64),
    ):
        assert router_config(options) is not None


def test_requests_that_are_to_be_refused_are_not_held_back() -> None:
    assert queue_seconds(FrontendOptions(router_queue_seconds=0.5)) == 0.5
    assert queue_seconds(FrontendOptions(router_queue_seconds=0.5, busy_prefill_tokens=1000)) == 0
