"""Shares the engines between tenants, so that one that floods them cannot starve another.

Order: the router's queue and vLLM's scheduler take the request with the highest priority first. A request
gets a lower one the more requests of its tenant are already in flight, so tenants take turns. Classes stand
above that: all requests of a class go before those of the classes below it.

Room: order does not help a request that finds every slot of the engines taken. So a tenant with more than
its part of the slots (all slots, divided by the tenants of the last minutes) may take only nine of ten; above
that its next requests wait here. The rest is for those who use less than their part. A tenant that is alone
has all slots.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store.keys import BATCH, CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable

DEEPEST = 1000
"""Requests of a tenant beyond this one are equal among themselves."""
OPEN_SHARE = 0.9
"""Of the slots that tenants above their part may take together."""
ACTIVE_SECONDS = 600.0
"""How long after its last request a tenant still has a part."""
WAIT_SECONDS = 60.0
SETTLED_SECONDS = 5.0
INTERACTIVE_SECONDS = 2.0
MUCH = 0.875
MOST_WAITING = 1000
"""Requests of one tenant that wait here."""


class FairShares:
    """Counts the requests in flight at this gateway, and lets new ones in."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots: float | None = None
        """How many requests the engines can run at a time; None while nobody knows."""
        self._clock = clock
        self._asked_at = -math.inf
        self._open: dict[str, tuple[str, str, float]] = {}
        """Tenant, class and beginning of each, the oldest first."""
        self._without_client: set[str] = set()
        """Those of `_open` that Envoy does not know."""
        self._in_flight: Counter[str] = Counter()
        self._of_class: Counter[str] = Counter()
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def interactive(self) -> int:
        """Requests that somebody waits for."""
        return len(self._open) - self._of_class[BATCH]

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def busy(self) -> float:
        """Return how much batches should hold back, 0 to 1: much for a moment after every other request."""
        if self._clock() > self._asked_at + INTERACTIVE_SECONDS and not self.interactive:
            return 0.0
        return max(MUCH, min(1.0, 4 * self.interactive / self.slots) if self.slots else 0.0)

    def must_wait(self, tenant: str) -> bool:
        """Return whether a tenant has more than its part while little is left, or others of it wait."""
        self._note(tenant)
        return bool(self._waiting.get(tenant)) or not self._has_room(tenant)

    def _note(self, tenant: str) -> None:
        now = self._clock()
        self._seen[tenant] = now
        self._seen.move_to_end(tenant)
        while next(iter(self._seen.values())) < now - ACTIVE_SECONDS:
            self._seen.popitem(last=False)

    def _has_room(self, tenant: str) -> bool:
        if self.slots is None:
            return True
        mine, tenants = self._in_flight[tenant], max(1, len(self._seen))
        if mine < max(1.0, self.slots / tenants):
            return True
        return tenants > 1 and len(self._open) < OPEN_SHARE * self.slots

    async def wait(self, tenant: str) -> None:
        """Wait until there is room for a request of this tenant; refuse it after a while."""
        line = self._waiting.setdefault(tenant, deque())
        turn = asyncio.get_running_loop().create_future()
        if len(line) >= MOST_WAITING:
            raise _too_many(tenant)
        line.append(turn)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except TimeoutError:
            raise _too_many(tenant) from None
        finally:
            if turn in line:
                line.remove(turn)
            if not line:
                self._waiting.pop(tenant, None)

    def enter(self, request_id: str, tenant: str, priority_class: str, *, has_client: bool = True) -> int:
        """Count a new request; return its priority: more is sooner."""
        if not has_client:
            self._without_client.add(request_id)
        ahead = self._in_flight[tenant]
        self._open[request_id] = tenant, priority_class, self._clock()
        self._in_flight[tenant] += 1
        self._of_class[priority_class] += 1
        if priority_class != BATCH:
            self._asked_at = self._clock()
        return priority(priority_class, ahead)

    def leave(self, request_id: str) -> None:
        """Forget a request that has ended; one that is unknown began before this process did."""
        self._without_client.discard(request_id)
        found = self._open.pop(request_id, None)
        if found is None:
            return
        tenant, priority_class, _ = found
        self._of_class[priority_class] -= 1
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]
        self.let_in()

    def let_in(self) -> None:
        """Let one waiting request in if there is room: of the tenant with the fewest in flight."""
        for tenant in sorted(self._waiting, key=lambda name: self._in_flight[name]):
            turn = next((one for one in self._waiting[tenant] if not one.done()), None)
            if turn is not None and self._has_room(tenant):
                turn.set_result(None)
                return

    def forget_lost(self, running: int) -> list[str]:
        """Forget the oldest requests that Envoy, which has so many, does not know; return them.

        A client that leaves while the control app answers ends a request without a word. Requests of the last
        seconds stay: Envoy's number and ours are not of the same moment.
        """
        old = self._clock() - SETTLED_SECONDS
        over = len(self._open) - len(self._without_client) - running
        of_clients = (item for item in self._open.items() if item[0] not in self._without_client)
        oldest = itertools.islice(of_clients, max(0, over))
        lost = [request_id for request_id, (_, _, began) in oldest if began < old]
        for request_id in lost:
            self.leave(request_id)
        return lost

    def forget(self) -> list[str]:
        """Forget all requests of clients, as when Envoy was killed; return them."""
        lost = [request_id for request_id in self._open if request_id not in self._without_client]
        for request_id in lost:
            self.leave(request_id)
        return lost


def priority(priority_class: str, ahead: int) -> int:
    """Return a number that is higher for what goes first: by class, then by the requests of the tenant."""
    return (len(CLASSES) - 1 - CLASSES.index(priority_class)) * (DEEPEST + 1) + DEEPEST - min(ahead, DEEPEST)


def _too_many(tenant: str) -> GatewayError:
    return GatewayError(
        429,
        f"too many requests of tenant {tenant} are running or waiting; try again later",
        code="too_many_requests",
        headers={"retry-after": "5"},
    )
