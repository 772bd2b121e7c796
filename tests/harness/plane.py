"""Calls workers over the runtime's request plane, past the frontend.

Run as `python -m harness.plane` with the deployment's environment: each line of its input is a JSON object
{"address": "COMPONENT.ENDPOINT", "request": …}, each line of its output {"chunks": […]} or {"error": "…"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Plane:
    """The test's side."""

    process: subprocess.Popen[str]

    def call(self, address: str, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"address": address, "request": request}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextmanager
def plane(env: dict[str, str]) -> Iterator[Plane]:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.plane"],
        cwd=Path(__file__).parents[1],
        env={**env, "DYN_LOG": "off"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Plane(process)
        finally:
            process.kill()


async def answer_lines() -> None:
    from dynamo.runtime import DistributedRuntime

    discovery = os.environ.get("DYN_DISCOVERY_BACKEND", "file")
    request = os.environ.get("DYN_REQUEST_PLANE", "tcp")
    runtime = DistributedRuntime(asyncio.get_running_loop(), discovery, request, event_plane="zmq")
    clients: dict[str, Any] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        task = json.loads(line)
        address = f"{os.environ['DYN_NAMESPACE']}.{task['address']}"
        if address not in clients:
            clients[address] = await runtime.endpoint(address).client()
        try:
            async with asyncio.timeout(40):
                await clients[address].wait_for_instances()
                stream = await clients[address].round_robin(task["request"], annotated=False)
                print(json.dumps({"chunks": [chunk async for chunk in stream]}), flush=True)
        except Exception as exc:  # whatever a worker raised is the answer
            print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), flush=True)


if __name__ == "__main__":
    asyncio.run(answer_lines())
