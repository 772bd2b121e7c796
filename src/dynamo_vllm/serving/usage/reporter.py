"""Sends records to a gateway until one has taken them; several gateways share one ledger."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo.runtime import Client, Endpoint

    from dynamo_vllm.serving.usage.record import UsageRecord
    from dynamo_vllm.serving.usage.spool import LeftFile, Spool

logger = logging.getLogger(__name__)
GATHER_SECONDS = 0.1
"""Records of so long a time travel together."""
RETRY_SECONDS = 1.0
WARN_SECONDS = 60.0
MOST_TOGETHER = 500
ANSWER_SECONDS = 10.0
LAST_SECONDS = 3.0
"""For the last records of a worker that ends."""


class Reporter:
    """One per worker; does nothing until the first record, unless a killed worker has left some."""

    def __init__(self, endpoint: Endpoint, spool: Spool) -> None:
        self._endpoint = endpoint
        self._spool = spool
        self._waiting: list[UsageRecord] = []
        self._has_records = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._warned_at: float | None = None

    @property
    def waiting(self) -> int:
        """Records that no gateway has taken yet."""
        return len(self._waiting)

    def start(self) -> None:
        """Send what killed workers have left, if there is any."""
        if self._spool.has_left():
            self._begin()

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, record: UsageRecord) -> None:
        """Keep a record, and send it soon."""
        self._spool.append(record)
        self._waiting.append(record)
        self._has_records.set()
        self._begin()

    async def close(self) -> None:
        """Send what is left, if a gateway is there."""
        if self._task is None:
            return
        self._task.cancel()
        try:
            async with asyncio.timeout(LAST_SECONDS):
                while self._waiting and await self._send_some():
                    pass
        except TimeoutError:
            pass
        if self._waiting:
            logger.warning("%d usage records wait on disk for a gateway", len(self._waiting))
        self._spool.close(is_empty=not self._waiting)

    async def _run(self) -> None:
        taking_over = asyncio.create_task(self._take_over())
        try:
            await self._report()
        finally:
            taking_over.cancel()

    async def _report(self) -> None:
        while True:
            await self._has_records.wait()
            await asyncio.sleep(GATHER_SECONDS)
            if await self._send_some():
                self._warned_at = None
            else:
                self._warn()
                await asyncio.sleep(RETRY_SECONDS)

    def _warn(self) -> None:
        now = time.monotonic()
        if self._warned_at is None or now > self._warned_at + WARN_SECONDS:
            self._warned_at = now
            logger.warning("no gateway takes %d usage records; they are kept and sent later", self.waiting)

    async def _send_some(self) -> bool:
        """Return whether a gateway has taken records."""
        some = self._waiting[:MOST_TOGETHER]
        taken = await self._send(some)
        if not taken:
            return False
        self._waiting[: len(some)] = [record for index, record in enumerate(some) if index not in taken]
        if not self._waiting:
            self._has_records.clear()
            self._spool.empty()
        return True

    async def _take_over(self) -> None:
        """Send the records of workers that were killed here."""
        for records, file in self._spool.left_behind():
            while (taken := await self._send(records)) is None:  # noqa: ASYNC110
                await asyncio.sleep(RETRY_SECONDS)
            self._finish(file, len(taken) == len(records))

    @staticmethod
    def _finish(file: LeftFile, is_done: bool) -> None:
        """Records of another ledger stay for a gateway that has it."""
        if is_done:
            file.remove()
        else:
            file.leave()

    async def _send(self, records: Sequence[UsageRecord]) -> set[int] | None:
        """Return the indexes of those that were taken; None if no gateway answers."""
        try:
            with of_runtime():
                if self._client is None:
                    self._client = await self._endpoint.client()
                found = [instance.instance_id for instance in self._client.instances()]
                if not found:
                    return None
                async with asyncio.timeout(ANSWER_SECONDS):
                    body = {"records": msgspec.to_builtins(list(records))}
                    stream = await self._client.direct(body, random.choice(found), annotated=False)
                    replies: list[Any] = [reply async for reply in stream]
        except (RuntimeFailed, TimeoutError) as exc:
            logger.debug("no gateway took usage records: %s", exc)
            return None
        return set(replies[-1]["taken"]) if replies else None
