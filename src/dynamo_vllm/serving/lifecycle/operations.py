"""Runs operator requests on the engine with a timeout, so that a hung one cannot block the worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.engine.base import Wake
from dynamo_vllm.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.engine.base import EngineOp

SECONDS = 600.0
"""Enough to copy the weights of a large model to host memory, to read an adapter, to write a profile."""
WAKE_SECONDS = 1800.0
"""After a sleep of level 2 the weights are read from disk again, as at a start."""


class Controlled(Protocol):
    """The part of an engine that runs operations."""

    async def control(self, op: EngineOp) -> int | None: ...


class BoundedOperations:
    """Runs an engine's operations. One that does not finish in time ends the engine."""

    def __init__(self, engine: Controlled, on_dead: Callable[[EngineDead], None]) -> None:
        self._engine = engine
        self._on_dead = on_dead

    async def control(self, op: EngineOp) -> int | None:
        seconds = WAKE_SECONDS if isinstance(op, Wake) else SECONDS
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._engine.control(op)
        except TimeoutError:
            if not limit.expired():
                raise
            dead = EngineDead(f"{type(op).__name__} did not finish within {seconds:g} s")
            self._on_dead(dead)  # the caller may be gone
            raise dead from None
