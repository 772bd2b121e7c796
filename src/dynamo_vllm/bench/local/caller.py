"""Calls a worker directly on the request plane, without a frontend, and measures how fast it answers.

Run it as `python -m dynamo_vllm.bench.local.caller` with the environment of the deployment. It writes one
JSON object. It uses more CPU time than the worker, so the worker's CPU time says more than tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import psutil
import uvloop
from dynamo.runtime import DistributedRuntime

from dynamo_vllm.bench.report.processes import cpu_seconds

WAIT_SECONDS = 120.0
_FIRST_ID, _LAST_ID = 10, 900


def request_of(number: int, options: argparse.Namespace) -> dict[str, object]:
    """Return a greedy request of the token protocol; prompts differ in their tokens."""
    first = _FIRST_ID + number % (_LAST_ID - _FIRST_ID)
    return {
        "model": options.model,
        "token_ids": [first] * options.input_tokens,
        "stop_conditions": {"max_tokens": options.output_tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "output_options": {},
        "eos_token_ids": [],
    }


async def measure(options: argparse.Namespace) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, options.discovery_backend, "tcp", event_plane="zmq")
    client = await runtime.endpoint(options.address).client()
    await asyncio.wait_for(client.wait_for_instances(), WAIT_SECONDS)
    await drive(client, options, options.concurrency)  # opens the connections
    worker, own = psutil.Process(options.watch), psutil.Process()
    cpu, own_cpu, began = cpu_seconds(worker), cpu_seconds(own), time.perf_counter()
    frames, tokens = await drive(client, options, options.requests)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "frames": frames,
        "tokens": tokens,
        "worker_cpu_seconds": cpu_seconds(worker) - cpu,
        "client_cpu_seconds": cpu_seconds(own) - own_cpu,
    }


async def drive(client: Any, options: argparse.Namespace, requests: int) -> tuple[int, int]:
    """Send this many requests, `concurrency` at a time; return how many frames and tokens came back."""
    numbers = iter(range(requests))
    frames = tokens = 0

    async def send() -> None:
        nonlocal frames, tokens
        for number in numbers:
            async for frame in await client.round_robin(request_of(number, options), annotated=False):
                frames += 1
                tokens += len(frame["token_ids"])

    await asyncio.gather(*(send() for _ in range(options.concurrency)))
    return frames, tokens


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m dynamo_vllm.bench.local.caller", description=__doc__)
    made.add_argument("address", help="namespace.component.endpoint")
    made.add_argument("--model", required=True)
    made.add_argument("--watch", type=int, required=True, metavar="PID", help="the worker's process")
    made.add_argument("--discovery-backend", default="file")
    made.add_argument("--concurrency", type=int, default=32)
    made.add_argument("--requests", type=int, default=256)
    made.add_argument("--input-tokens", type=int, default=16)
    made.add_argument("--output-tokens", type=int, default=256)
    return made


def main() -> None:
    json.dump(uvloop.run(measure(parser().parse_args())), sys.stdout)


if __name__ == "__main__":
    main()
