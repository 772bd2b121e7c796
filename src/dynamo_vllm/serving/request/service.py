"""Handles every request: parse, prepare, generate, encode, send."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dynamo.llm.exceptions import StreamIncomplete

from dynamo_vllm import wire
from dynamo_vllm.errors import EngineDead, UnknownModel
from dynamo_vllm.media.held_bytes import held_by_request
from dynamo_vllm.serving.request.boundary import boundary
from dynamo_vllm.serving.request.crash_notes import CrashNotes
from dynamo_vllm.serving.request.egress import Egress
from dynamo_vllm.serving.request.outlet import ClientLeft, outlet
from dynamo_vllm.serving.request.pace import UNPACED, Gathering, Pace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from dynamo_vllm.engine.base import Engine
    from dynamo_vllm.lora.registry import Registry
    from dynamo_vllm.lora.slots import Lease
    from dynamo_vllm.roles.base import Role
    from dynamo_vllm.serving.request.cancel import Cancellable, InFlight
    from dynamo_vllm.serving.request.sender import Sender
    from dynamo_vllm.serving.request.tracing import Generate
    from dynamo_vllm.serving.usage.meter import Meter


class Service:
    """Parse, prepare, generate, encode, send."""

    def __init__(
        self,
        role: Role[Any],
        engine: Engine,
        in_flight: InFlight,
        on_dead: Callable[[EngineDead], None],
        adapters: Registry | None = None,
        on_error: Callable[[str], None] = lambda _: None,
        trace_headers: Callable[[str], Mapping[str, str] | None] | None = None,
        egress: Egress | None = None,
        pace: Pace | None = None,
        crash_notes: CrashNotes | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._role = role
        self._engine = engine
        self._in_flight = in_flight
        self._on_dead = on_dead
        self._adapters = adapters
        self._on_error = on_error
        self._trace_headers = trace_headers
        self._egress = egress or Egress()
        self._pace = pace or Pace()
        self._crash_notes = crash_notes or CrashNotes(None)
        self._meter = meter

    async def generate(
        self, request: object, context: Cancellable, response_sender: Sender
    ) -> AsyncIterator[dict[str, Any]]:
        """The runtime needs an async generator; with push egress it yields nothing.

        The parameter names are the runtime's: `response_sender` in the signature turns push egress on.
        """
        watch = self._in_flight.watch(context)
        with (
            boundary(context.id(), self._on_dead, self._on_error, watch.is_stopped),
            watch,
            held_by_request(),
            self._crash_notes.waiting(context.id()) as note,
        ):
            parsed = self._role.parse(request)
            watch.rank = wire.routed_rank(parsed)
            lease = self._lease(self._role.adapter(parsed))
            try:
                adapter = lease.adapter if lease else None
                # The runtime (1.6.1) takes any first chunk as a sign of health.
                reports_stages = self._role.card.reports_stages and not parsed.is_health_check
                if reports_stages:
                    _send_stage(wire.PREPARING, response_sender)
                job = await watch.unless_left(self._role.prepare(parsed, watch.job_id, adapter))
                if job is None or context.is_stopped():
                    return
                if reports_stages:
                    _send_stage(wire.PREPARED, response_sender)
                if self._trace_headers is not None:
                    job = dataclasses.replace(job, trace_headers=self._trace_headers(context.id()))
                stream = self._egress.stream(response_sender.send, watch.left)
                paced = job.sampling.gives_only_tokens and job.pipeline is None
                gathering = Gathering(self._pace if paced else UNPACED)
                out = outlet(self._role.encoder(parsed, job).encode, stream, watch, note, gathering)
                count = self._meter.begin(context, parsed, job) if self._meter is not None else None
                if count is not None:
                    out = count.around(out)
                try:
                    with suppress(ClientLeft):
                        watch.computes()
                        if job.answer is None:
                            await self._engine.stream(job, out)
                        else:
                            out(job.answer)
                        await watch.unless_left(stream.sent())
                    response_sender.close()
                finally:
                    gathering.end()
                    stream.abandon()
                    if count is not None:
                        count.end(watch)
            finally:
                if lease is not None:
                    lease.release()
        return
        yield  # type: ignore[unreachable]  # makes this a generator

    def _lease(self, adapter: str | None) -> Lease | None:
        """Hold a lease of the adapter while the request runs; without it vLLM would load it again."""
        if not adapter:
            return None
        try:
            if self._adapters is None:
                raise UnknownModel(f"there is no adapter {adapter!r}", parameter="model")
            return self._adapters.lease(adapter)
        except UnknownModel:
            if self._role.card.needs_adapters:
                raise
            return None


@dataclasses.dataclass(slots=True)
class ChunkCollector:
    """A sender for a caller without one."""

    chunks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def send(self, chunk: dict[str, object]) -> None:
        self.chunks.append(chunk)

    def close(self) -> None:
        """Nothing to close."""


def answering_probes(generate: Generate, probe_seconds: float) -> Generate:
    """Runtime 1.6.1 calls the handler itself to probe it, without a sender, and reads what is yielded.

    It gives up on a probe silently and sends the next, so each one ends by itself.
    """

    def probed(
        request: object, context: Any, response_sender: Sender | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        if response_sender is not None:
            return generate(request, context, response_sender)
        return probe(request, context)

    async def probe(request: object, context: Any) -> AsyncIterator[dict[str, Any]]:
        kept = ChunkCollector()
        limit = asyncio.timeout(probe_seconds)
        try:
            async with limit:
                async for _ in generate(request, context, kept):
                    """Yield nothing if there is a sender."""
        except StreamIncomplete:  # what a cancelled request says: this worker is leaving
            if limit.expired():
                raise TimeoutError from None
            raise
        for chunk in kept.chunks:
            yield chunk

    return probed


def _send_stage(stage: wire.Chunk, sender: Sender) -> None:
    with suppress(RuntimeError):  # the stream is closed; the context reports it a moment later
        sender.send(stage)
