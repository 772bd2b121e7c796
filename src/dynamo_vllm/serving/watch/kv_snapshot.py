"""Asks all workers what they have cached, in a process of its own.

Event channels keep nothing, so who comes late needs a snapshot. A router of the runtime takes one from the
workers when it starts. In 1.6.1 a router that was dropped leaves a thread and an inotify instance behind,
so it lives in a process that ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

from dynamo_vllm.errors import DynamoVllmError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.options import ReachOptions

LIMIT_SECONDS = 60.0
SETTLED_SECONDS = 0.5
"""A router is complete if it has learnt nothing for this long; it does not say so itself."""
SETTLE_LIMIT_SECONDS = 20.0
LOOK_SECONDS = 0.1


class SnapshotFailed(DynamoVllmError):
    """There is no snapshot; the message says why."""


async def take(options: ReachOptions, block_sizes: Mapping[str, int]) -> list[bytes]:
    """Return the events, as JSON, of the workers at each address, namespace.component.endpoint."""
    told = [f"{address}={size}" for address, size in block_sizes.items()]
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, options.discovery_backend, options.request_plane, *told),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as exc:
        raise SnapshotFailed(f"no process for a snapshot of the caches: {exc}") from None
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            out, _ = await process.communicate()
    except TimeoutError:
        raise SnapshotFailed(f"no snapshot of the caches within {LIMIT_SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        raise SnapshotFailed(f"the snapshot of the caches failed with exit code {process.returncode}")
    return out.splitlines()


async def dump(backend: str, request_plane: str, addresses: Sequence[str]) -> list[bytes]:
    """Run in the child."""
    from dynamo.llm import KvRouter, KvRouterConfig
    from dynamo.runtime import DistributedRuntime

    drt = DistributedRuntime(asyncio.get_running_loop(), backend, request_plane, event_plane="zmq")
    found = []
    for told in addresses:
        address, _, size = told.partition("=")
        router = KvRouter(drt.endpoint(address), int(size), KvRouterConfig(router_event_threads=1))
        found.append(await _settled(router))
    drt.shutdown()
    return found


async def _settled(router: object) -> bytes:
    began = changed = time.monotonic()
    last = ""
    while True:
        events: str = await router.dump_events()  # type: ignore[attr-defined]
        now = time.monotonic()
        if len(events) != len(last):
            changed, last = now, events
        if now - changed >= SETTLED_SECONDS or now - began >= SETTLE_LIMIT_SECONDS:
            return events.encode()
        await asyncio.sleep(LOOK_SECONDS)


def main() -> None:
    result = os.dup(1)
    os.dup2(2, 1)  # the runtime may log there
    backend, request_plane, *addresses = sys.argv[1:]
    found = asyncio.run(dump(backend, request_plane, addresses))
    with open(result, "wb") as out:
        for events in found:
            out.write(events + b"\n")
        out.flush()
    os._exit(0)  # without waiting for the runtime's threads


if __name__ == "__main__":
    main()
