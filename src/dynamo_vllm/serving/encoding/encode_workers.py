"""Calls encode workers over the runtime: in turn, with a timeout, and never for a client that has
disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from dynamo.runtime import Context

from dynamo_vllm import wire
from dynamo_vllm.roles.encode import Handoff, parse_answer
from dynamo_vllm.roles.encoded import NoEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo.runtime import Client

    from dynamo_vllm.serving.encoding.transfer import TransferClient


class EncodeWorkers:
    """The encode workers at one address, as discovery shows them."""

    def __init__(
        self,
        client: Client,
        seconds: float,
        loading_seconds: float,
        context_length: int,
        transfer_client: TransferClient | None = None,
    ) -> None:
        """`seconds` does not include the time in which the encode worker reports that it loads media.

        `context_length` is that of the calling worker.
        """
        self._client = client
        self._transfer_client = transfer_client
        self._seconds = seconds
        self._loading_seconds = loading_seconds
        self._context_length = context_length
        self._turn = 0

    async def encode(self, job_id: str, request: dict[str, Any]) -> Handoff:
        """Try two encode workers: the first may have just left."""
        instances = sorted(self._client.instance_ids())
        if not instances:
            raise NoEncoder("there is no encode worker")
        self._turn += 1
        tries = [instances[(self._turn + n) % len(instances)] for n in range(min(2, len(instances)))]
        try:
            async with asyncio.timeout(self._seconds) as limit:
                deadline = _CallDeadline(limit, self._seconds, self._loading_seconds)
                return await self._first(tries, job_id, request, deadline)
        except TimeoutError:
            raise NoEncoder(
                f"no encode worker answered in time (--encoder-seconds {self._seconds:g})"
            ) from None

    async def _first(
        self, tries: Sequence[int], job_id: str, request: dict[str, Any], deadline: _CallDeadline
    ) -> Handoff:
        *others, last = tries
        for instance in others:
            with contextlib.suppress(NoEncoder):
                return await self._ask(instance, job_id, request, deadline)
        return await self._ask(last, job_id, request, deadline)

    async def _ask(
        self, instance: int, job_id: str, request: dict[str, Any], deadline: _CallDeadline
    ) -> Handoff:
        context = Context(job_id)  # the same id in all logs
        try:
            stream = await self._client.direct(request, instance, annotated=False, context=context)
            chunk: Any = {}
            async for chunk in stream:
                deadline.adapt(chunk)
            answer = parse_answer(chunk["disaggregated_params"])
            if self._transfer_client is not None and isinstance(answer, Handoff):
                for encoded in answer.encoded:
                    await self._transfer_client.fetch(instance, encoded.name, context)
        except asyncio.CancelledError:
            context.stop_generating()
            raise
        except (msgspec.ValidationError, LookupError, TypeError) as exc:
            raise NoEncoder(f"encode worker {instance:x} sent an invalid answer: {exc}") from None
        except Exception as exc:  # the runtime raises nothing narrower
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            raise NoEncoder(f"encode worker {instance:x}: {reason}") from None
        if isinstance(answer, Handoff):
            return answer
        if answer.context_length not in (None, self._context_length):
            raise NoEncoder(f"encode worker {instance:x} has --max-model-len {answer.context_length}")
        raise answer.error()  # another encode worker would refuse it too


class _CallDeadline:
    """Extends the deadline while media are loaded: servers may be slow, and the encode worker has its own
    limit."""

    def __init__(self, limit: asyncio.Timeout, seconds: float, loading_seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._latest = _now() + loading_seconds + seconds

    def adapt(self, chunk: object) -> None:
        """Follow the stages that the encode worker reports; an older one reports none."""
        if chunk == wire.PREPARING:
            self._limit.reschedule(self._latest)
        elif chunk == wire.PREPARED:
            self._limit.reschedule(min(self._latest, _now() + self._seconds))


def _now() -> float:
    return asyncio.get_running_loop().time()
