"""Limits how many jobs run at once, and lets the tenants that wait take turns."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CAPACITY_SECONDS = 0.1
"""How often the capacity is read while somebody waits: nothing announces a change of it."""


class TenantSlots:
    """Grants a slot to the tenant with the fewest, and among equals to the one with the oldest grant.

    `share` limits a tenant to so many times the slots that are still free: with 16 slots and a share of 3,
    one tenant gets 12, the next one 3, and a third one still finds a slot at once. Without it a tenant that
    is alone gets all, and others wait until one of its jobs ends. It belongs to one event loop.
    """

    def __init__(self, capacity: Callable[[], int], *, share: float = math.inf) -> None:
        self._capacity = capacity
        self._share = share
        self._running: Counter[str] = Counter()
        self._last_grants: OrderedDict[str, None] = OrderedDict()
        """Tenants with slots or waiters, the one with the oldest grant first."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def total(self) -> int:
        return self._running.total()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def running(self, tenant: str) -> int:
        return self._running[tenant]

    def try_take(self, tenant: str) -> bool:
        """Take a slot unless there is none for this tenant, or others wait for one; `give_back` ends it."""
        if self._waiting or not self._has_slot(tenant):
            return False
        self._grant(tenant)
        return True

    def give_back(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
            if tenant not in self._waiting:
                self._last_grants.pop(tenant, None)
        self._let_in()

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        if not self.try_take(tenant):
            await self._wait(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot came at the same moment
                self.give_back(tenant)
            else:
                self._forget(tenant, turn)
            raise

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[tenant]

    def _let_in(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (tenant := self._next()) is not None:
            turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.done():
                self._grant(tenant)
                turn.set_result(None)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(CAPACITY_SECONDS, self._let_in)

    def _next(self) -> str | None:
        """Return the tenant whose turn it is; None if there is no slot for any of those that wait."""
        order = {tenant: place for place, tenant in enumerate(self._last_grants)}
        eligible = [tenant for tenant in self._waiting if self._has_slot(tenant)]
        return min(eligible, key=lambda name: (self._running[name], order.get(name, -1)), default=None)

    def _has_slot(self, tenant: str) -> bool:
        free, running = self._capacity() - self.total, self._running[tenant]
        return free > 0 and (running == 0 or running < self._share * free)

    def _grant(self, tenant: str) -> None:
        self._running[tenant] += 1
        self._last_grants[tenant] = None
        self._last_grants.move_to_end(tenant)
