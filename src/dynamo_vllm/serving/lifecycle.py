"""The states of a worker, and the ways between them."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dynamo_vllm.serving.cancel import InFlight

logger = logging.getLogger(__name__)

# A frontend may have chosen this worker just before it learnt that the worker leaves.
SETTLE_SECONDS = 1.0
QUIET_SECONDS = 0.3
ABORT_SECONDS = 3.0
_POLL_SECONDS = 0.02


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    UNWELL = "unwell"
    DRAINING = "draining"
    STOPPED = "stopped"


class Discovery(Protocol):
    async def withdraw(self) -> None: ...

    async def restore(self) -> bool: ...

    async def remove(self) -> None: ...


class Health(Protocol):
    """The part of the runtime that answers /health."""

    def set_health_status(self, ready: bool) -> None: ...


class Lifecycle:
    """STARTING → READY ⇄ UNWELL → DRAINING → STOPPED; readiness means that a request would be answered."""

    def __init__(self, discovery: Discovery, health: Health, in_flight: InFlight) -> None:
        self._discovery = discovery
        self._health = health
        self._in_flight = in_flight
        self._turn = asyncio.Lock()
        self.state = State.STARTING

    def ready(self) -> None:
        self.state = State.READY
        self._health.set_health_status(True)

    async def unwell(self, reason: str) -> None:
        """Out of routing until `well`; what runs goes on as far as the engine lets it."""
        async with self._turn:
            if self.state is State.READY:
                logger.error("taken out of service: %s", reason)
                self.state = State.UNWELL
                self._health.set_health_status(False)
                await self._discovery.withdraw()

    async def well(self) -> None:
        async with self._turn:
            if self.state is State.UNWELL and await self._discovery.restore():
                self.ready()
                logger.info("back in service")

    async def drain(self, budget_seconds: float) -> None:
        """Leave discovery, let requests finish within the budget, hand what is left to other workers."""
        async with self._turn:
            if self.state in (State.DRAINING, State.STOPPED):
                return
            self.state = State.DRAINING
        began = time.monotonic()
        self._health.set_health_status(False)
        await self._discovery.remove()
        logger.info("draining %d requests, %.0f s at most", len(self._in_flight), budget_seconds)
        if not await self._quiet(began + SETTLE_SECONDS, began + max(budget_seconds, SETTLE_SECONDS)):
            logger.warning("the drain budget is used up: %d requests move on", len(self._in_flight))
            self._in_flight.abort_all()
            await self._quiet(0, time.monotonic() + ABORT_SECONDS)
        self.state = State.STOPPED
        logger.info("drained in %.1f s", time.monotonic() - began)

    async def _quiet(self, not_before: float, deadline: float) -> bool:
        """Whether nothing was in flight for a moment, after `not_before` and before the deadline."""
        while True:
            now = time.monotonic()
            calm = len(self._in_flight) == 0 and now - self._in_flight.last_change >= QUIET_SECONDS
            if calm and now >= not_before:
                return True
            if now >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
