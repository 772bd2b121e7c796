"""The runtime's HTTP server as upstream's frontend starts it, without our routes and settings."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from harness import processes
from harness.stack import TESTS, Stack
from harness.waiting import until


@contextmanager
def running(beside: Stack) -> Iterator[str]:
    """Start one in the deployment and yield its URL."""
    port = processes.free_port()
    url = f"http://127.0.0.1:{port}"
    modules = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "harness.plain_frontend", str(port)]
    env = beside.environment(PYTHONPATH=modules)
    started = processes.start("plain frontend", command, beside.folder / "plain_frontend.log", env, TESTS)

    def listens() -> bool:
        assert started.poll() is None, started.log.read_text()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until("the plain frontend to listen", listens)
        yield url
    finally:
        processes.kill_tree(started.pid)
        started.wait(processes.STOP_SECONDS)


async def main(port: int) -> None:
    from dynamo.llm import EngineType, EntrypointArgs, RouterConfig, RouterMode, make_engine, run_input
    from dynamo.runtime import DistributedRuntime

    discovery = os.environ.get("DYN_DISCOVERY_BACKEND", "file")
    request = os.environ.get("DYN_REQUEST_PLANE", "tcp")
    event = os.environ.get("DYN_EVENT_PLANE", "zmq")
    runtime = DistributedRuntime(asyncio.get_running_loop(), discovery, request, event_plane=event)
    router = RouterConfig(RouterMode.RoundRobin)
    arguments = EntrypointArgs(
        EngineType.Dynamic, http_host="127.0.0.1", http_port=port, router_config=router
    )
    await run_input(runtime, "http", await make_engine(runtime, arguments))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
