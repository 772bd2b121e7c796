"""Batches in one process: a database, a folder, and a frontend that answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import httpx

from dynamo_vllm.gateway import schema
from dynamo_vllm.gateway.batches.files import PURPOSE, FileStore
from dynamo_vllm.gateway.batches.runner import Tools
from dynamo_vllm.gateway.batches.store import Batch, BatchStore
from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.tenant_slots import TenantSlots
from harness.open_gate import OpenGate

T = TypeVar("T")
CHAT = "/v1/chat/completions"
ANSWER = {"id": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
Later = Coroutine[None, None, httpx.Response]
Handler = Callable[[httpx.Request], httpx.Response] | Callable[[httpx.Request], Later]


def answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json=ANSWER)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Bench]:
    bench = Bench(folder)
    try:
        yield bench
    finally:
        bench.database.close()


class Bench:
    """A database, a folder and a frontend that answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self._ticks = 0
        self.folder = folder
        self.database = Database(f"sqlite:///{folder / 'g.db'}", schema.ALL)
        self.store = BatchStore(stale_seconds=20, clock=self._clock)
        self.files = FileStore(self.database, folder, days=1, file_bytes=10**6, tenant_bytes=10**7)

    def _clock(self, _: object) -> float:
        """Later at each call, so that rows have an order."""
        self._ticks += 1
        return self.now + self._ticks * 1e-6

    def tools(self, frontend: Handler = answer, concurrency: int = 4) -> Tools:
        client = httpx.AsyncClient(transport=httpx.MockTransport(frontend), base_url="http://f")
        return Tools(
            database=self.database,
            store=self.store,
            files=self.files,
            frontend=client,
            apis=client,
            line_slots=TenantSlots(lambda: concurrency),
            file_slots=TenantSlots(lambda: 2),
            parts=self.folder / "parts",
            concurrency=concurrency,
            gate=OpenGate(),
            most_lines=1000,
            beat_seconds=5,
        )

    def run(self, work: Callable[[Transaction], T]) -> T:
        return self.database.run_now(work)

    def state(self, batch: Batch) -> Batch:
        return self.run(lambda t: self.store.get(t, batch.id, batch.tenant))

    def failures(self, batch: Batch) -> int:
        return self.run(lambda t: self.store.failures(t, batch.id))[0]

    async def until(self, what: str, is_so: Callable[[], bool]) -> None:
        """The limit is only for a hang."""
        try:
            async with asyncio.timeout(60):
                while not is_so():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"waited in vain for {what}") from None

    async def until_ended(self, *batches: Batch) -> None:
        for batch in batches:
            await self.until(f"the end of {batch.tenant}'s batch", functools.partial(self._has_ended, batch))

    def _has_ended(self, batch: Batch) -> bool:
        return self.state(batch).ended is not None

    def begin(self, count: int, tenant: str = "a", **fields: object) -> Batch:
        body = {"model": "m", **fields}
        lines = (
            json.dumps({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {**body, "n": n}})
            for n in range(count)
        )
        return self.begin_with("\n".join(lines).encode(), tenant)

    def begin_with(self, content: bytes, tenant: str = "a", seconds: float = 1e12) -> Batch:
        file_id = f"file-{secrets.token_hex(4)}"
        self.files.path(file_id).write_bytes(content)
        self.run(lambda t: self.files.add(t, file_id, tenant, PURPOSE, "in", 1))
        return self.run(
            lambda t: self.store.create(
                t,
                tenant=tenant,
                key_id=tenant,
                endpoint=CHAT,
                file_id=file_id,
                window=("24h", seconds),
                metadata=None,
            )
        )

    def claim(self, batch: Batch, owner: str) -> Batch:
        found = self.run(lambda t: self.store.claim(t, batch.id, owner))
        assert found is not None
        return found

    def ended(self, batch: Batch) -> tuple[Batch, list[str], list[int]]:
        """The batch, the ids in its output, and the statuses in its errors."""
        found = self.run(lambda t: self.store.get(t, batch.id, batch.tenant))
        texts = [
            self.files.path(name).read_text().splitlines() if name else []
            for name in (found.output_file, found.error_file)
        ]
        good, bad = ([json.loads(text) for text in part] for part in texts)
        return found, [one["custom_id"] for one in good], [one["response"]["status_code"] for one in bad]
