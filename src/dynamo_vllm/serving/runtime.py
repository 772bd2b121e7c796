"""Creates the runtime on the running loop; `config.runtime_env` has written its variables before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynamo.runtime import DistributedRuntime

if TYPE_CHECKING:
    from dynamo_vllm.config.options import ReachOptions, RuntimeOptions


def create(options: RuntimeOptions) -> DistributedRuntime:
    return DistributedRuntime(
        asyncio.get_running_loop(),
        options.discovery_backend,
        options.request_plane,
        event_plane=options.event_plane,
    )


def caller(options: ReachOptions) -> DistributedRuntime:
    """For a process that asks others and publishes nothing, for which any event plane does."""
    loop = asyncio.get_running_loop()
    return DistributedRuntime(loop, options.discovery_backend, options.request_plane, event_plane="zmq")


def alone() -> DistributedRuntime:
    """For a process that is in no deployment: its health server, and no service is needed."""
    return DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
