"""Sends requests to workers of a model without the frontend, each to the one with the fewest of ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynamo_vllm.serving.calls.failures import CallFailed, WorkerLost, read
from dynamo_vllm.serving.plane.failures import RuntimeFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping

    from dynamo.runtime import Client

    from dynamo_vllm.serving.calls.card import WorkerCard
    from dynamo_vllm.serving.calls.directory import Directory

logger = logging.getLogger(__name__)
TRIES = 2
SEEN_SECONDS = 3.0
"""How long a worker that has told its models may take until this process sees the endpoint that answers."""
LOOK_SECONDS = 0.05
AWAY_SECONDS = 5.0
"""How long a worker that was lost is the last choice: discovery may still have it."""
Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to a worker."""

    model: str
    api: str
    """What the worker must offer; see `WorkerCard.apis`."""
    body: Mapping[str, Any]
    request_id: str
    """Its name in the worker and in the ledger."""
    metadata: Mapping[str, str] = field(default_factory=dict)


class Caller:
    """Counts the requests in flight from here by worker."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._in_flight: Counter[int] = Counter()
        self._latest: dict[int, int] = {}
        """The number of the last request of each worker: of equal ones the next is the one that waits."""
        self._count = 0
        self._away: dict[int, float] = {}
        """Until when workers are the last choice."""

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """Yield what a worker answers; raise CallFailed if it refuses.

        Another worker is tried once, if the first is lost before its answer began. Close the generator, or
        cancel its reader: then the worker ends the request.
        """
        lost: set[int] = set()
        while True:
            worker, client = await self._choose(call, lost)
            answers = self._answers(client, worker.instance, call)
            has_begun = False
            try:
                async with contextlib.aclosing(answers):
                    async for chunk in answers:
                        has_begun = True
                        yield chunk
                return
            except WorkerLost as exc:
                lost.add(worker.instance)
                self._away[worker.instance] = time.monotonic() + AWAY_SECONDS
                if has_begun or len(lost) >= TRIES:
                    raise
                logger.info("request %s: worker %x: %s", call.request_id, worker.instance, exc.__cause__)

    async def whole(self, call: Call) -> list[Chunk]:
        """Return the whole answer."""
        async with contextlib.aclosing(self.stream(call)) as chunks:
            return [chunk async for chunk in chunks]

    async def _choose(self, call: Call, lost: Collection[int]) -> tuple[WorkerCard, Client]:
        """Return the worker with the fewest requests among those that are there for this model."""
        having = await self._directory.having(call.model)
        offering = [card for card in having if call.api in card.apis]
        if having and not offering:
            apis = sorted({api for card in having for api in card.apis})
            raise CallFailed(
                400,
                f"the model {call.model!r} is not for {call.api}"
                + (f"; it is for {', '.join(apis)}" if apis else ""),
                "model",
            )
        if self._directory.is_empty:
            raise CallFailed(503, "no worker is there; try again")
        if not offering:
            raise CallFailed(404, f"the model {call.model!r} does not exist", "model")
        left = [card for card in offering if card.instance not in lost]
        until = time.monotonic() + SEEN_SECONDS
        while not (found := await self._seen(left)):
            if not left or time.monotonic() > until:
                raise WorkerLost(503, f"no worker of {call.model!r} answers; try again")
            await asyncio.sleep(LOOK_SECONDS)
        chosen = min(found, key=lambda one: self._place(one[0].instance))
        self._count += 1
        self._latest[chosen[0].instance] = self._count
        return chosen

    async def _seen(self, cards: Collection[WorkerCard]) -> list[tuple[WorkerCard, Client]]:
        """Return the workers whose endpoint discovery has shown to this process."""
        found = []
        for card in cards:
            try:
                client = await self._directory.client(card.address)
            except RuntimeFailed:
                continue
            if card.instance in client.instance_ids():
                found.append((card, client))
        return found

    def _place(self, instance: int) -> tuple[bool, int, int]:
        """Return what is least for the worker that gets the next request."""
        is_away = self._away.get(instance, 0.0) > time.monotonic()
        return is_away, self._in_flight[instance], self._latest.get(instance, 0)

    async def _answers(self, client: Client, instance: int, call: Call) -> AsyncGenerator[Chunk, None]:
        from dynamo.runtime import Context

        context = Context(call.request_id, metadata=dict(call.metadata))
        is_whole = False
        self._in_flight[instance] += 1
        try:
            stream = await client.direct(dict(call.body), instance, annotated=False, context=context)
            async for chunk in stream:
                if isinstance(chunk, dict):
                    yield chunk
            is_whole = True
        except Exception as exc:  # the runtime raises nothing narrower
            is_whole = True
            raise read(exc) from exc
        finally:
            self._in_flight[instance] -= 1
            if not self._in_flight[instance]:
                del self._in_flight[instance]
            if not is_whole:
                # Runtime 1.6.1 tells a worker that sends nothing of a dropped stream only in this way.
                context.stop_generating()
