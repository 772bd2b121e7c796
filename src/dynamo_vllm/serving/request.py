"""The one loop every request goes through."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.errors import Draining, EngineDead
from dynamo_vllm.serving.boundary import boundary

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from dynamo_vllm.engine.base import Engine
    from dynamo_vllm.job import Job, Output
    from dynamo_vllm.roles.base import Role
    from dynamo_vllm.serving.cancel import Cancellable, InFlight


class Sender(Protocol):
    """The runtime's push egress."""

    def send(self, chunk: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Service:
    """Parse, prepare, generate, encode, send."""

    def __init__(
        self, role: Role[Any], engine: Engine, in_flight: InFlight, on_dead: Callable[[EngineDead], None]
    ) -> None:
        self._role = role
        self._engine = engine
        self._in_flight = in_flight
        self._on_dead = on_dead

    async def generate(
        self, request: object, context: Cancellable, response_sender: Sender
    ) -> AsyncIterator[dict[str, Any]]:
        """The runtime wants an async generator; with push egress it yields nothing.

        The parameter names are the runtime's: `response_sender` in the signature switches push egress on.
        """
        with boundary(context.id(), self._on_dead), self._in_flight.watch(context) as watch:
            parsed = self._role.parse(request)
            job = await self._role.prepare(parsed, watch.job_id)
            if context.is_stopped():
                return
            send, encode = response_sender.send, self._role.encoder(parsed, job).encode
            async with aclosing(self._outputs(job)) as outputs:
                async for output in outputs:
                    if watch.client_left:
                        break  # closing the generator ends the job where the abort came before it began
                    if output.finish == "abort":
                        raise Draining("this worker is going away")
                    chunk = encode(output)
                    try:
                        send(chunk)
                    except RuntimeError:  # the stream is closed; the context tells a moment later
                        watch.left()
            response_sender.close()
        return
        yield  # type: ignore[unreachable]  # makes this a generator

    def _outputs(self, job: Job) -> AsyncGenerator[Output, None]:
        return self._engine.generate(job) if job.answer is None else _only(job.answer)


async def _only(output: Output) -> AsyncGenerator[Output, None]:
    yield output
