"""Restores a process in file discovery after its files were mistaken for those of a dead process.

- Defect: runtime 1.6.1 removes files that nobody touched for ten seconds of wall-clock time. If the clock was
  set forward, or the machine or a process was suspended, this hits live processes.
- Effect: the runtime does not write a file again; the worker keeps running but gets no requests.
- Fix: remember the content of this process's files, and restore those that were removed for their age. This
  module can go when the runtime writes its files again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
LEASE_SECONDS = 10.0
"""After that time without a touch, any process of the deployment removes a file."""
TOUCHED_SECONDS = 5.0
"""The runtime touches its files every three seconds."""
_UNFINISHED = ".tmp_"
_PORT = re.compile(r":(\d+)$")


@dataclass(slots=True)
class LeaseFile:
    inode: int
    data: bytes
    modified: float


class FileKeeper:
    """Watches the files of one process."""

    def __init__(self, folder: Path, instance: int) -> None:
        self._folder = folder
        self._ids = {f"{instance:x}"}
        """The last part of the names of our files."""
        self._mine: dict[Path, LeaseFile] = {}
        self._others: dict[Path, int] = {}
        """Inodes of files that are not ours."""
        self._ports: set[int] | None = None
        """Where this process listens; None until a look needs it."""

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError):  # a full disk, or a folder that is missing for a moment
                self.look()

    def look(self) -> None:
        self._ports = None
        found = dict(self._files())
        for path, status in found.items():
            self._see(path, status)
        for path in [path for path in self._others if path not in found]:
            del self._others[path]
        lost = [path for path in self._mine if path not in found]
        aged = [path for path in lost if time.time() - self._mine[path].modified >= LEASE_SECONDS]
        for path in lost:
            if path not in aged:  # this process removed it
                del self._mine[path]
        for path in aged:
            self._put_back(path)
        if aged:
            logger.warning(
                "discovery had lost this process: restored its %d files; the clock was set forward, "
                "or the machine was suspended",
                len(aged),
            )

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """List the files; raises OSError if a folder cannot be read, because its content must not count as
        gone.

        That happens when a process has no file descriptors left. The runtime then cannot touch its files
        either, and other processes remove them. That is right: it cannot answer, and those who wait for it
        notice.
        """
        found = []
        for parent, _, names in os.walk(self._folder, onerror=_raise):
            for name in names:
                with contextlib.suppress(OSError):  # removed meanwhile
                    path = Path(parent, name)
                    if not name.startswith(_UNFINISHED):
                        found.append((path, path.stat()))
        return found

    def _see(self, path: Path, status: os.stat_result) -> None:
        known = self._mine.get(path)
        if known is not None and known.inode == status.st_ino:
            known.modified = status.st_mtime
            if time.time() - status.st_mtime > TOUCHED_SECONDS:  # before another process removes it
                with contextlib.suppress(FileNotFoundError):
                    os.utime(path)
        elif self._others.get(path) != status.st_ino:
            with contextlib.suppress(OSError):  # removed meanwhile
                data = path.read_bytes()
                if self._is_mine(path, data):
                    self._mine[path] = LeaseFile(status.st_ino, data, status.st_mtime)
                else:
                    self._others[path] = status.st_ino

    def _is_mine(self, path: Path, data: bytes) -> bool:
        """Ours if the name has our instance or the content our port: event publishers have separate ids."""
        number = unquote(path.name).rpartition("/")[2]
        if number not in self._ids and (port := _port(data)) is not None:
            if self._ports is None:  # once per look: while many workers start, there are new files in each
                self._ports = _own_ports()
            if port in self._ports:
                self._ids.add(number)
        return number in self._ids

    def _put_back(self, path: Path) -> None:
        """Write atomically, and not over a file that exists again."""
        entry = self._mine[path]
        fresh = path.with_name(f"{_UNFINISHED}{os.getpid()}-{threading.get_ident():x}")
        try:
            fresh.write_bytes(entry.data)
            now = time.time()
            os.utime(fresh, (now, now))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
            entry.inode, entry.modified = fresh.stat().st_ino, now
        finally:
            fresh.unlink(missing_ok=True)


def _raise(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError):  # removed meanwhile
        raise exc


def _port(data: bytes) -> int | None:
    """Return where the owner of a file listens, if the file says so."""
    try:
        endpoint: Any = json.loads(data)["transport"]["config"]["endpoint"]
        found = _PORT.search(endpoint)
    except (ValueError, KeyError, TypeError):
        return None
    return int(found[1]) if found else None


def _own_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


async def keep(folder: Path, instance: int) -> None:
    """Run until cancelled. In a thread, so that a busy loop does not look like a suspended process."""
    stop = threading.Event()
    thread = threading.Thread(target=FileKeeper(folder, instance).run, args=(stop,), daemon=True)
    thread.start()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        stop.set()
