"""Lets requests wait a moment for another request of their key or tenant to end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_WAITING = 16
"""Requests of one key or tenant that wait; the next ones are told to come again."""


class Seats:
    """Wakes those that wait for one of some subjects. It belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def have_room(self, subjects: Iterable[str]) -> bool:
        return all(len(self._waiting.get(subject, ())) < MOST_WAITING for subject in subjects)

    async def wait(self, subjects: Iterable[str], seconds: float) -> None:
        """Return when a request of one of the subjects has ended, or after some seconds."""
        names = tuple(subjects)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for name in names:
            self._waiting.setdefault(name, set()).add(turn)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await turn
        finally:
            for name in names:
                self._waiting[name].discard(turn)
                if not self._waiting[name]:
                    del self._waiting[name]

    def free(self, subjects: Iterable[str]) -> None:
        """Wake those that wait for these subjects."""
        for subject in subjects:
            for turn in self._waiting.get(subject, ()):
                if not turn.done():
                    turn.set_result(None)
