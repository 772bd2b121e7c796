"""Records requests that wait for their first token, in files that survive the worker.

The frontend (1.6.1) moves a request whose worker died and tells the next worker nothing about it. So workers
share a folder. Each keeps a file there, locked while it lives; a worker that finds a request in the files of
two dead workers does not try it a third time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from typing import TYPE_CHECKING

from dynamo_vllm.errors import EngineDead, NotTriedAgain

if TYPE_CHECKING:
    from types import TracebackType

logger = logging.getLogger(__name__)
MOST_DEATHS = 2
KEPT_SECONDS = 600.0
"""Lifetime of a dead worker's file; by then a request has moved or failed."""
_NEW = ".new"
_ENTRY_BYTES = 16
_FREE = bytes(_ENTRY_BYTES)


class CrashNotes:
    """This worker's file, and those of dead workers. Without a folder it records nothing."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._name = ""
        self._fd: int | None = None
        self._free: list[int] = []
        self._places = 0
        self._living: dict[str, int] = {}
        """File descriptors of the other workers' files."""
        self._left: dict[str, frozenset[bytes]] = {}
        """Requests that dead workers had started."""
        if folder is not None:
            try:
                self._begin(folder)
            except OSError as exc:
                logger.warning(
                    "requests that crash workers cannot be recorded in %s: %s", folder, exc.strerror
                )

    def _begin(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        fd, path = tempfile.mkstemp(suffix=_NEW, dir=folder)
        # Not flock, whose lock ends with the sockets: the frontend could be faster.
        fcntl.lockf(fd, fcntl.LOCK_EX)
        os.rename(path, path.removesuffix(_NEW))  # nobody sees it unlocked
        self._fd, self._name = fd, os.path.basename(path.removesuffix(_NEW))
        self._look()
        for name in self._left:
            with contextlib.suppress(OSError):
                there = os.path.join(folder, name)
                if time.time() - os.stat(there).st_mtime > KEPT_SECONDS:
                    os.unlink(there)

    def waiting(self, request_id: str) -> Note:
        """Record this request until it has a token; raises NotTriedAgain if workers died of it."""
        if self._fd is None:
            return Note(self, None)
        entry = hashlib.blake2b(request_id.encode(), digest_size=_ENTRY_BYTES).digest()
        self._look()
        deaths = sum(entry in left for left in self._left.values())
        if deaths >= MOST_DEATHS:
            raise NotTriedAgain(f"it crashed {deaths} workers before its first token; it is not tried again")
        return Note(self, self._write(entry))

    def died(self) -> None:
        """The engine is dead: keep the current entries; they count from now on."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def _write(self, entry: bytes) -> int | None:
        """Return the entry's position; a full disk costs the entry, not the request."""
        place = self._free.pop() if self._free else self._places
        self._places = max(self._places, place + 1)
        if self._put(place, entry):
            return place
        self._free.append(place)
        return None

    def erase(self, place: int) -> None:
        if self._put(place, _FREE):
            self._free.append(place)

    def _put(self, place: int, entry: bytes) -> bool:
        if self._fd is None:
            return False
        with contextlib.suppress(OSError):
            return os.pwrite(self._fd, entry, place * _ENTRY_BYTES) == _ENTRY_BYTES
        return False

    def _look(self) -> None:
        """Read the files of workers that died since the last check."""
        assert self._folder is not None
        with contextlib.suppress(OSError):  # removed by somebody
            names = {name for name in os.listdir(self._folder) if not name.endswith(_NEW)} - {self._name}
            for name in names - self._left.keys():
                with contextlib.suppress(OSError):
                    self._look_at(name)
            for name in self._living.keys() - names:
                os.close(self._living.pop(name))
            for name in self._left.keys() - names:
                del self._left[name]

    def _look_at(self, name: str) -> None:
        fd = self._living.get(name)
        if fd is None:
            path = os.path.join(str(self._folder), name)
            fd = self._living[name] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises while its worker lives
        with os.fdopen(self._living.pop(name), "rb") as file:
            text = file.read()
        entries = (text[at : at + _ENTRY_BYTES] for at in range(0, len(text), _ENTRY_BYTES))
        self._left[name] = frozenset(entries) - {_FREE}


class Note:
    """One request's entry; erased with the first token, and at the end unless the engine died."""

    __slots__ = ("_notes", "_place")

    def __init__(self, notes: CrashNotes, place: int | None) -> None:
        self._notes = notes
        self._place = place

    def answered(self) -> None:
        """The request has a token: a later crash is not its fault alone."""
        if self._place is not None:
            self._notes.erase(self._place)
            self._place = None

    def __enter__(self) -> Note:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if isinstance(exc, EngineDead):
            self._notes.died()
        self.answered()
