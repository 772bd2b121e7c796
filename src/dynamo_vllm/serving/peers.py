"""Knows whether another worker of the same endpoint went away lately.

When a worker goes away the frontend sends its requests here with the answer so far appended to the prompt,
and nothing in such a request tells it from a new one. Counting its prompt would bill the answer as prompt,
and the frontend believes our count over its own, which is right. So while a request may be such a one, we
leave the count to the frontend; all that is lost is the number of cached tokens.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
LATE_SECONDS = 2.0
"""How much later than the moved request the news of its worker's end may arrive."""
MEMORY_SECONDS = 60.0
"""How long after a worker's end its requests may still come."""
_ADDRESS = re.compile(r"^(?:tcp://)?\[?(?P<host>[^/\[\]]+?)\]?:(?P<port>\d+)(?:/|$)")


class Transport(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def address(self) -> str: ...


class Instance(Protocol):
    """The part of the runtime's instance we use."""

    @property
    def instance_id(self) -> int: ...

    @property
    def transport(self) -> Transport: ...


@dataclass(slots=True)
class Peer:
    """One other worker. `withdrawn_at` is when it left discovery, `lost_at` when its process ended."""

    withdrawn_at: float | None = None
    lost_at: float | None = None
    connection: asyncio.BaseTransport | None = None

    def may_have_sent(self, start: float) -> bool:
        """Whether a request that began at `start` may have moved here from this peer."""
        left = [at for at in (self.withdrawn_at, self.lost_at) if at is not None]
        if not left or min(left) > start + LATE_SECONDS:
            return False
        ended = (
            self.lost_at
            if self.lost_at is not None
            else self.withdrawn_at
            if self.connection is None
            else None
        )
        return ended is None or ended >= start - MEMORY_SECONDS


@dataclass(slots=True)
class Peers:
    """Follows the endpoint's instances, and holds one idle connection to each: its end is seen at once."""

    own_id: int
    instances: Callable[[], Iterable[Instance]]
    known: dict[int, Peer] = field(default_factory=dict)

    async def run(self) -> None:
        try:
            while True:
                await self.look()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self.close()

    def close(self) -> None:
        for peer in self.known.values():
            if peer.connection is not None:
                peer.connection.close()

    async def look(self) -> None:
        now = time.monotonic()
        seen = {i.instance_id: i for i in self.instances() if i.instance_id != self.own_id}
        for instance_id, instance in seen.items():
            peer = self.known.setdefault(instance_id, Peer())
            peer.withdrawn_at = None
            if peer.connection is None and peer.lost_at is None:
                await self._connect(peer, instance)
        for instance_id, peer in list(self.known.items()):
            if instance_id not in seen and peer.withdrawn_at is None:
                peer.withdrawn_at = now
            gone = [at for at in (peer.withdrawn_at, peer.lost_at) if at is not None]
            if (
                peer.connection is None
                and gone
                and instance_id not in seen
                and max(gone) < now - 2 * MEMORY_SECONDS
            ):
                del self.known[instance_id]

    async def _connect(self, peer: Peer, instance: Instance) -> None:
        found = _ADDRESS.match(instance.transport.address) if instance.transport.kind == "tcp" else None
        if found is None:
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(1.0):
                peer.connection, _ = await loop.create_connection(
                    lambda: _UntilLost(peer), found["host"], int(found["port"])
                )
        except (OSError, TimeoutError):
            peer.lost_at = time.monotonic()

    def may_have_moved(self, start: float) -> bool:
        """Whether a request that began at `start` may carry a part of its answer in its prompt."""
        return any(peer.may_have_sent(start) for peer in self.known.values())


class _UntilLost(asyncio.Protocol):
    """Says nothing and waits for the other side's end."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def connection_lost(self, exc: Exception | None) -> None:
        self._peer.lost_at, self._peer.connection = time.monotonic(), None
