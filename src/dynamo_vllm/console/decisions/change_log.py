"""Keeps what blocks had before they changed, so that the state at an earlier time can be told.

The log is kept in a few parts. The oldest is dropped as a whole, which costs much less than to drop each
change.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Optional

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MOST_CHANGES = 150_000
"""Changes that are kept; each takes about 200 bytes."""
KEEP_SECONDS = 600.0
"""How long changes are kept, and up to a part longer."""
PARTS = 8
"""Full ones in this time; one more is being filled."""
NEVER = float("inf")

_Change = tuple[float, int, Optional["_Change"]]
"""When a block changed, the bits that it had before, and its change before that one in the same part."""


class _Part(NamedTuple):
    until: float
    """No change in it is later."""
    changes: dict[int, _Change]
    """The last one of each block."""


class ChangeLog:
    """Keeps at most `most` changes; a part of them is dropped when there are more."""

    def __init__(self, most: int = MOST_CHANGES) -> None:
        self._most_in_part = max(1, most // (PARTS + 1))
        self._older: deque[_Part] = deque()
        self._newest: dict[int, _Change] = {}
        self._count = 0
        """Changes in the newest part."""
        self._part_ends = -NEVER
        self.latest = 0.0
        """The time of the last change."""
        self.begins = -NEVER
        """All changes after this time are kept."""

    def add(self, here: int, before: int, at: float) -> None:
        if self._count == self._most_in_part or at > self._part_ends:
            self._begin_part(at)
        if at > self.latest:
            self.latest = at
        self._count += 1
        newest = self._newest
        newest[here] = (at, before, newest.get(here))

    def _begin_part(self, at: float) -> None:
        if self._newest:
            self._older.append(_Part(self.latest, self._newest))
        while self._older and (len(self._older) > PARTS or self._older[0].until < at - KEEP_SECONDS):
            self.begins = self._older.popleft().until
        self._newest = {}
        self._count = 0
        self._part_ends = at + KEEP_SECONDS / PARTS

    def states(self, hashes: Sequence[int], at: float, now: Mapping[int, int]) -> Iterator[int]:
        """Yield the bits that each block had at this time; `now` has those of today."""
        parts = self._since(at)
        for here in hashes:
            for part in parts:
                before = _first_after(part.get(here), at)
                if before is not None:
                    yield before
                    break
            else:
                yield now.get(here, 0)

    def times(self, hashes: Sequence[int], begin: float, end: float) -> list[float]:
        """Return when these blocks changed, within this time."""
        found = set()
        for part in self._since(begin):
            for here in hashes:
                change = part.get(here)
                while change is not None:
                    if begin <= change[0] <= end:
                        found.add(change[0])
                    change = change[2]
        return sorted(found)

    def _since(self, at: float) -> list[dict[int, _Change]]:
        """Return the parts with changes at this time or later, the oldest first."""
        return [*(part.changes for part in self._older if part.until >= at), self._newest]


def _first_after(change: _Change | None, at: float) -> int | None:
    """Return what a block had before the first of its changes after this time; None if there is none."""
    found = None
    while change is not None:
        if change[0] > at:
            found = change[1]
        change = change[2]
    return found
