"""Calls a worker over the runtime's request plane, past the frontend; prints one JSON line per request.

Run as `python -m harness.plane ADDRESS REQUEST…` with the deployment's environment.
"""

from __future__ import annotations

import asyncio
import json
import sys


async def call(address: str, requests: list[dict[str, object]]) -> None:
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    client = await runtime.endpoint(address).client()
    await client.wait_for_instances()
    for request in requests:
        try:
            stream = await client.round_robin(request, annotated=False)
            print(json.dumps({"chunks": [chunk async for chunk in stream]}), flush=True)
        except Exception as exc:  # whatever a worker raised is the answer
            print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(call(sys.argv[1], [json.loads(text) for text in sys.argv[2:]]))
