"""Keeps a folder with links to the few entries of file discovery that a caller needs.

The runtime (1.6.1) tells each watcher of a folder of every change in it, and workers set the time of each of
their files every three seconds: with 100 workers a client costs about 1 % of a core while nothing happens.
A hard link has the same time and the same content, but changes through the other name are not told.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

from dynamo_vllm.serving.watch.discovery import INSTANCES, UNFINISHED, FolderChanges
from dynamo_vllm.serving.watch.owned_folder import OwnedFolder

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

LOOK_SECONDS = 0.5
ALIVE_SECONDS = 9.0
"""The runtime (1.6.1) takes an entry that was not touched for 10 s for that of a dead process."""
PREFIX = "console-"


class LinkedDiscovery:
    """`folder` has the entries of these endpoints (namespace/component/endpoint), once `follow` was called.

    It is the real folder where links or locks cannot be made, as on some network file systems.
    """

    def __init__(self, real: Path, endpoints: Collection[str]) -> None:
        self._from = real / "v1" / INSTANCES
        self._endpoints = frozenset(endpoints)
        self._changes = FolderChanges(self._from)
        self._linked: dict[str, int] = {}
        self._is_complete = False
        self._owned = self._made(real)
        self.folder = real if self._owned is None else self._owned.path

    @staticmethod
    def _made(real: Path) -> OwnedFolder | None:
        try:
            owned = OwnedFolder(real, PREFIX)
        except OSError:
            return None
        try:
            made = owned.path
            (made / "v1" / INSTANCES).mkdir(parents=True)
            (made / "probe").touch()
            os.link(made / "probe", made / "v1" / "probe")
        except OSError:
            owned.remove()
            return None
        return owned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned is not None:
            self._owned.remove()

    async def run(self) -> None:
        """Follow until cancelled."""
        while self._owned is not None:
            self.follow()
            self._owned.touch()
            await asyncio.sleep(LOOK_SECONDS)

    def follow(self) -> None:
        """Link what is new, and remove what is gone."""
        if self._owned is None or not (self._changes.look() or not self._is_complete):
            return
        to = self.folder / "v1" / INSTANCES
        wanted = self._wanted()
        for name in self._linked.keys() - wanted.keys():
            (to / name).unlink(missing_ok=True)
        self._is_complete = True
        linked = {}
        for name, inode in wanted.items():
            if self._linked.get(name) != inode and not self._link(self._from / name, to / name):
                self._is_complete = False
                continue
            linked[name] = inode
        self._linked = linked

    def _wanted(self) -> dict[str, int]:
        try:
            with os.scandir(self._from) as files:
                return {f.name: f.inode() for f in files if endpoint_of(f.name) in self._endpoints}
        except OSError:
            return {}

    def _link(self, entry: Path, to: Path) -> bool:
        """Return whether it is linked. An entry of a dead process is left until somebody removes it."""
        try:
            if time.time() - entry.stat().st_mtime > ALIVE_SECONDS:
                return False
            unfinished = to.with_name(f"{UNFINISHED}{to.name[-40:]}")
            os.link(entry, unfinished)
            unfinished.replace(to)
        except OSError:
            return False
        return True


def endpoint_of(name: str) -> str:
    """Return namespace/component/endpoint of the name of an instance's file."""
    return unquote(name).rpartition("/")[0]
