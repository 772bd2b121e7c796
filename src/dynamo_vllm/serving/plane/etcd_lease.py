"""Brings a process back into etcd after etcd forgot it: restarted without its data, or out of reach too long.

Everything a process has in discovery hangs on its lease. Runtime 1.6.1 goes on asking for a lease that etcd
does not know, then ends the process, with all that runs in it. The lease has a number that may be asked for
again: so we remember what hung on it, and put all of it back under the same number, and the runtime finds
its lease as it was. Frontends see the worker come back with the same instance.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dynamo_vllm.serving.plane import file_lease
from dynamo_vllm.serving.plane.etcd import Etcd, EtcdError

if TYPE_CHECKING:
    from pathlib import Path

    from dynamo_vllm.config.planes import EtcdAccess

logger = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
READ_AGAIN = 5
"""Looks between two readings of all values; a new key is read at once."""
LEAST_SECONDS = 10
"""The runtime asks for its lease again within about five."""


class Keeper:
    """Looks after one lease."""

    def __init__(self, etcd: Etcd, lease: int) -> None:
        self._etcd = etcd
        self._lease = lease
        self._seconds = LEAST_SECONDS
        self._entries: dict[bytes, bytes] = {}
        self._looks = 0
        self._is_lost = False
        self._is_away = False

    async def run(self) -> None:
        """For ever; etcd being away is its usual work."""
        while True:
            try:
                await self.look()
                if self._is_away:
                    logger.info("etcd answers again")
                self._is_away = False
            except EtcdError as exc:
                if not self._is_away:
                    logger.warning("%s; what runs goes on, and so do the requests", exc)
                self._is_away = True
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        found = await self._etcd.lease(self._lease)
        if found is None:
            self._is_lost = True
            await self._etcd.grant(self._lease, self._seconds)
        if found is None or self._is_lost:  # as long as the entries could not be put back
            await self._restore()
            return
        self._seconds = max(found.granted_seconds, LEAST_SECONDS)
        self._looks += 1
        if found.keys != self._entries.keys() or self._looks % READ_AGAIN == 0:
            self._entries = await self._etcd.values(sorted(found.keys))

    async def _restore(self) -> None:
        await self._etcd.put(self._entries, self._lease)
        self._is_lost = False
        logger.warning(
            "etcd had lost this process: lease %x and its %d entries are there again",
            self._lease,
            len(self._entries),
        )


async def keep(access: EtcdAccess | None, folder: Path | None, lease: int) -> None:
    """As a task beside everything else; in Kubernetes there is nothing to do."""
    if folder is not None:
        await file_lease.keep(folder, lease)
    if access is None:
        return
    try:
        client = Etcd(access)
    except OSError as exc:  # a certificate that only the runtime can read
        logger.warning("if etcd loses this process it will not come back by itself: %s", exc)
        return
    async with client as etcd:
        await Keeper(etcd, lease).run()
