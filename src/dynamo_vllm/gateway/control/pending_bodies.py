"""Limits the bytes of bodies that a tenant has begun and not ended: Envoy keeps what has come of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_BYTES = 64 << 10
"""As which a shorter body counts: many of them are much too, and so are their headers."""
MOST_BYTES = 256 << 20
"""Of one tenant; a body that is larger may come alone."""
WAIT_SECONDS = 10.0
"""How long the next body waits for those before it; Envoy reads nothing of it meanwhile."""
MOST_WAITING = 1000
FORGET_SECONDS = 3600.0
"""Envoy ends a request whose body has not come by then (`EnvoySettings.body_seconds`)."""


@dataclass(frozen=True, slots=True)
class _Body:
    tenant: str
    size: int
    began: float


class PendingBodies:
    """Counts declared bytes from the check of the key until the body is there; for one event loop."""

    def __init__(
        self,
        largest: int,
        *,
        most: int = MOST_BYTES,
        least: int = LEAST_BYTES,
        wait_seconds: float = WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`largest` is the most that Envoy takes of one body."""
        self._largest = largest
        self._most = max(most, largest)
        self._least = min(least, largest)
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._bodies: OrderedDict[str, _Body] = OrderedDict()
        """By request, the oldest first."""
        self._bytes: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def bytes_of(self, tenant: str) -> int:
        return self._bytes[tenant]

    async def begin(self, request_id: str, tenant: str, declared: int | None) -> None:
        """Count a body that is about to come; raise GatewayError if others stand before it for too long."""
        if self.begin_at_once(request_id, tenant, declared):
            return
        size = self._size(declared)
        await self._wait(tenant, size)
        self._bodies[request_id] = _Body(tenant, size, self._clock())

    def begin_at_once(self, request_id: str, tenant: str, declared: int | None) -> bool:
        """Count a body that is about to come, unless it has to wait; return whether it is counted."""
        size = self._size(declared)
        self._forget_old()
        is_small = size <= self._least  # one more of these makes no large one wait for long
        if (self._waiting.get(tenant) and not is_small) or not self._has_room(tenant, size):
            return False
        self._bytes[tenant] += size
        self._bodies[request_id] = _Body(tenant, size, self._clock())
        return True

    def _size(self, declared: int | None) -> int:
        return self._largest if declared is None else max(self._least, min(declared, self._largest))

    def end(self, request_id: str) -> None:
        """Forget a body that has come, or never will."""
        body = self._bodies.pop(request_id, None)
        if body is not None:
            self._give_back(body.tenant, body.size)

    async def _wait(self, tenant: str, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(tenant, deque())
        if len(line) >= MOST_WAITING:
            raise _too_much(tenant)
        line.append((size, turn))
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except (TimeoutError, asyncio.CancelledError) as exc:
            if turn.done() and not turn.cancelled():  # room came at the same moment
                self._give_back(tenant, size)
            else:
                with contextlib.suppress(ValueError):
                    line.remove((size, turn))
                self._let_in(tenant)
            if isinstance(exc, TimeoutError):
                raise _too_much(tenant) from None
            raise

    def _give_back(self, tenant: str, size: int) -> None:
        self._bytes[tenant] -= size
        if not self._bytes[tenant]:
            del self._bytes[tenant]
        self._let_in(tenant)

    def _let_in(self, tenant: str) -> None:
        line = self._waiting.get(tenant)
        while line and self._has_room(tenant, line[0][0]):
            size, turn = line.popleft()
            if not turn.done():
                self._bytes[tenant] += size
                turn.set_result(None)
        if not line:
            self._waiting.pop(tenant, None)

    def _has_room(self, tenant: str, size: int) -> bool:
        return self._bytes[tenant] + size <= self._most

    def _forget_old(self) -> None:
        """Forget bodies whose end nobody told: their client left at the moment of the answer to Envoy."""
        old = self._clock() - FORGET_SECONDS
        while (request_id := next(iter(self._bodies), None)) is not None:
            if self._bodies[request_id].began >= old:
                return
            self.end(request_id)


def _too_much(tenant: str) -> GatewayError:
    return GatewayError(
        429,
        f"tenant {tenant} is sending {MOST_BYTES >> 20} MiB of request bodies already; "
        "send fewer large ones at a time",
        code="too_many_bytes",
        headers={"retry-after": "2"},
    )
