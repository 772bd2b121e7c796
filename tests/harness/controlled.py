"""A process in a worker's place that answers admin verbs with what a test wants to see.

Run as `python -m harness.controlled` with the deployment's environment and {verb: reply} as JSON. It writes
its instance once it is served, and then one line of JSON per request it gets.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST")
NEVER = "never"
"""In the place of a reply: none comes."""


@dataclass
class Controlled:
    """The test's side."""

    process: subprocess.Popen[str]
    instance: int

    def asked(self) -> dict[str, Any]:
        """The next request it got."""
        assert self.process.stdout is not None
        request: dict[str, Any] = json.loads(self.process.stdout.readline())
        return request


@contextmanager
def controlled(env: Mapping[str, str], replies: Mapping[str, Any]) -> Iterator[Controlled]:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.controlled", json.dumps(replies)],
        cwd=Path(__file__).parents[1],
        env={**env, **dict.fromkeys(HOSTS, "127.0.0.1"), "DYN_LOG": "off"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield Controlled(process, int(process.stdout.readline()))
        finally:
            process.kill()


async def serve(replies: Mapping[str, Any]) -> None:
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.admin.control")

    async def answer(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        print(json.dumps(request), flush=True)
        reply = replies.get(request["verb"])
        if reply is None:
            raise ValueError(f"unexpected verb {request['verb']}")
        if reply == NEVER:
            await asyncio.Event().wait()
        yield {"status": "success", **reply}

    serving = asyncio.ensure_future(endpoint.serve_endpoint(answer))
    client = await endpoint.client()
    while endpoint.connection_id() not in await client.wait_for_instances():
        await asyncio.sleep(0.02)
    print(endpoint.connection_id(), flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
