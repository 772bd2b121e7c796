"""How many chunks the runtime takes for a client that does not read, after its connection is found full.

Run as `python -m harness.places WANTED` with a discovery folder of its own; prints the number.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

CHUNK = {"data": "x" * 300_000}
"""Few of them fill a connection."""
STANDS_STILL_SECONDS = 30
"""Then it waits for the client; machines lose whole seconds to others."""


class Sending:
    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self.count = 0
        self.when_full: int | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        from dynamo_vllm.serving.request.full_sockets import count_full

        while True:
            if self.when_full is None and count_full():
                self.when_full = self.count
            self._sender.send(CHUNK)
            self.count += 1

    async def since_full(self, wanted: int) -> int:
        """Chunks sent since the connection was full: those wanted, or fewer where it waits."""
        loop = asyncio.get_running_loop()
        before, moved_at = 0, loop.time()
        while loop.time() - moved_at < STANDS_STILL_SECONDS:
            if self.when_full is not None and self.count - self.when_full >= wanted:
                break
            if self.count != before:
                before, moved_at = self.count, loop.time()
            await asyncio.sleep(0.05)
        return self.count - (self.when_full or self.count)


async def main(wanted: int) -> None:
    from dynamo.runtime import DistributedRuntime

    loop = asyncio.get_running_loop()
    found: asyncio.Future[int] = loop.create_future()

    async def generate(request: object, context: Any, response_sender: Any) -> AsyncIterator[object]:
        found.set_result(await Sending(response_sender).since_full(wanted))
        if found.cancelled():  # nothing is sent, but this is a generator
            yield None

    endpoint = DistributedRuntime(loop, "file", "tcp").endpoint("places.worker.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    client = await endpoint.client()
    await client.wait_for_instances()
    stream = await client.generate("")
    async for _ in stream:
        break
    print(await found, flush=True)
    serving.cancel()
    os._exit(0)  # a thread waits in the runtime for good


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
