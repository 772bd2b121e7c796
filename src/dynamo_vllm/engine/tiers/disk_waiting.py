"""Limits what waiting requests may want from disk at a time; the others compute.

If they wanted more than the host tier holds, they would replace each other's chunks there again and again. If
they wanted more than the disk reads in a few seconds, the last of them would wait longer than it computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARE = 2 / 3
"""Of the host tier."""
FIRST_RATE = 500e6
"""Bytes per second that a disk is expected to read, until one is measured."""
_NEWEST = 0.3
"""The weight of the newest measurement."""


class DiskWaiting:
    """Remembers what each waiting request was told to be on disk."""

    def __init__(self, rows: int, chunk_bytes: int, most_seconds: float) -> None:
        """`rows` is how many chunks the host tier holds, `most_seconds` how long a request should wait."""
        self._rows, self._most_seconds = rows, most_seconds
        self._rate = FIRST_RATE / chunk_bytes
        self._wanted: dict[str, set[bytes]] = {}
        self._asked: set[str] = set()

    @property
    def most(self) -> int:
        """Returns how many chunks all of them may want."""
        return max(1, int(min(self._rows * SHARE, self._rate * self._most_seconds)))

    def admits(self, key: bytes, asker: str) -> bool:
        """Returns whether a request may wait for a chunk; what it was told before stays true."""
        wanted = self._wanted.get(asker, ())
        if key not in wanted and sum(map(len, self._wanted.values())) >= self.most:
            return False
        self._wanted.setdefault(asker, set()).add(key)
        self._asked.add(asker)
        return True

    def end_step(self, loading: Iterable[str]) -> None:
        """Forgets requests that neither asked in this step nor wait for a load: they have their blocks."""
        for asker in self._wanted.keys() - self._asked.union(loading):
            del self._wanted[asker]
        self._asked.clear()

    def learn(self, chunks: int, seconds: float, *, by_all: bool = True) -> None:
        """Notes how long threads took for some chunks; if not all of them read, the disk may be faster."""
        rate = chunks / max(seconds, 1e-6)
        if by_all or rate > self._rate:
            self._rate += _NEWEST * (rate - self._rate)

    def learn_slow(self, chunks: int, seconds: float) -> None:
        """Notes what a load that was given up has shown: the next ones must fit at once."""
        self._rate = min(self._rate, chunks / seconds)
