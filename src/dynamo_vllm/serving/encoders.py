"""Asks encode workers over the runtime: in turn, within a time, and never for a client that left."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from dynamo.runtime import Context

from dynamo_vllm.roles.encode import Handoff
from dynamo_vllm.roles.encoded import NoEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo.runtime import Client

    from dynamo_vllm.serving.lending import Borrower


class Encoders:
    """The encode workers at one address, as discovery shows them."""

    def __init__(self, client: Client, seconds: float, borrower: Borrower | None = None) -> None:
        self._client = client
        self._borrower = borrower
        self._seconds = seconds
        self._turn = 0

    async def encode(self, job_id: str, request: dict[str, Any]) -> Handoff:
        """Two encoders are tried: one may just have gone."""
        instances = sorted(self._client.instance_ids())
        if not instances:
            raise NoEncoder("there is no encode worker")
        self._turn += 1
        tries = [instances[(self._turn + n) % len(instances)] for n in range(min(2, len(instances)))]
        try:
            async with asyncio.timeout(self._seconds):
                return await self._first(tries, job_id, request)
        except TimeoutError:
            raise NoEncoder(f"no encode worker answered within {self._seconds:g} s") from None

    async def _first(self, tries: Sequence[int], job_id: str, request: dict[str, Any]) -> Handoff:
        *others, last = tries
        for instance in others:
            with contextlib.suppress(NoEncoder):
                return await self._ask(instance, job_id, request)
        return await self._ask(last, job_id, request)

    async def _ask(self, instance: int, job_id: str, request: dict[str, Any]) -> Handoff:
        context = Context(job_id)  # the same id in all logs
        try:
            stream = await self._client.direct(request, instance, annotated=False, context=context)
            chunks = [chunk async for chunk in stream]
            handoff = msgspec.convert(chunks[-1]["disaggregated_params"], Handoff)
            if self._borrower is not None:
                for encoded in handoff.encoded:
                    await self._borrower.fetch(instance, encoded.name, context)
            return handoff
        except asyncio.CancelledError:
            context.stop_generating()
            raise
        except (msgspec.ValidationError, LookupError, TypeError) as exc:
            raise NoEncoder(f"encode worker {instance:x} gave no hand-off: {exc}") from None
        except Exception as exc:  # the runtime raises nothing narrower
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            raise NoEncoder(f"encode worker {instance:x}: {reason}") from None
