"""Restores a process in etcd after etcd lost it: restarted without its data, or unreachable for too long.

Everything a process has in discovery belongs to its lease. If etcd does not know the lease, runtime 1.6.1
keeps asking for it and then ends the process with all its requests. A lease id can be granted again. So we
remember the keys of the lease and restore all of them under the same id; the runtime finds its lease
unchanged, and frontends see the worker return with the same instance.
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
"""Checks between two reads of all values; a new key is read at once."""
LEAST_SECONDS = 10
"""The runtime asks for its lease again within about five seconds."""


class Keeper:
    """Watches one lease."""

    def __init__(self, etcd: Etcd, lease: int) -> None:
        self._etcd = etcd
        self._lease = lease
        self._seconds = LEAST_SECONDS
        self._entries: dict[bytes, bytes] = {}
        self._looks = 0
        self._is_lost = False
        self._is_away = False

    async def run(self) -> None:
        """Run forever; an etcd outage is the normal case."""
        while True:
            try:
                await self.look()
                if self._is_away:
                    logger.info("etcd answers again")
                self._is_away = False
            except EtcdError as exc:
                if not self._is_away:
                    logger.warning("%s; running workers and requests continue", exc)
                self._is_away = True
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        found = await self._etcd.lease(self._lease)
        if found is None:
            self._is_lost = True
            await self._etcd.grant(self._lease, self._seconds)
        if found is None or self._is_lost:  # while the entries could not be restored
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
            "etcd had lost this process: restored lease %x with %d entries",
            self._lease,
            len(self._entries),
        )


async def keep(access: EtcdAccess | None, folder: Path | None, lease: int) -> None:
    """Run as a background task; with Kubernetes discovery there is nothing to do."""
    if folder is not None:
        await file_lease.keep(folder, lease)
    if access is None:
        return
    try:
        client = Etcd(access)
    except OSError as exc:  # a certificate that only the runtime can read
        logger.warning("this process cannot be restored if etcd loses it: %s", exc)
        return
    async with client as etcd:
        await Keeper(etcd, lease).run()


async def give_back(access: EtcdAccess | None, lease: int) -> None:
    """End the lease. The runtime's own attempt may still be under way when the process ends."""
    if access is None:
        return
    try:
        async with Etcd(access) as etcd:
            await _revoke(etcd, lease)
    except (OSError, EtcdError) as exc:
        logger.info("etcd lists this process until its lease ends: %s", exc)


async def _revoke(etcd: Etcd, lease: int) -> None:
    try:
        await etcd.revoke(lease)
    except EtcdError:
        if await etcd.lease(lease) is not None:  # else the runtime was faster
            raise
