"""Knows which gateways live, so that what a killed one had reserved comes back within a minute."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.gateway.database import Database, Transaction

DEAD_SECONDS = 30.0
"""A holder of reservations that has not beaten for so long is dead."""
PAUSE_SECONDS = 15.0
"""After so long without a beat of our own, the others may have had no database either."""
_BEAT = (
    "INSERT INTO gateway_holders (name, beat) VALUES (?, ?)"
    " ON CONFLICT (name) DO UPDATE SET beat = excluded.beat"
)


class Holders:
    """Beats for the holders of one process, and watches the beats of all others.

    A beat is compared with the last one of the same holder, never with a clock: those of machines differ.
    """

    def __init__(
        self, database: Database, names: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._names = tuple(names)
        self._clock = clock
        self._last: dict[str, tuple[float | None, float]] = {}
        """The beat of each other holder, and when it was new to us."""
        self._beaten = clock()

    async def beat(self) -> list[str]:
        """Show that this process lives; return the holders that are dead."""
        beats = await self._database.run(self._beat)
        now, paused = self._clock(), self._clock() - self._beaten > PAUSE_SECONDS
        self._beaten = now
        others = {name: beat for name, beat in beats.items() if name not in self._names}
        for name in self._last.keys() - others.keys():
            del self._last[name]
        for name, beat in others.items():
            if paused or name not in self._last or self._last[name][0] != beat:
                self._last[name] = beat, now
        return [name for name, (_, since) in self._last.items() if now - since >= DEAD_SECONDS]

    async def forget(self, name: str) -> None:
        """Forget a dead holder, unless it has come back."""
        beat, _ = self._last.pop(name, (None, 0.0))
        await self._database.run(
            lambda t: t.execute("DELETE FROM gateway_holders WHERE name = ? AND beat = ?", name, beat)
        )

    def _beat(self, t: Transaction) -> dict[str, float | None]:
        t.many(_BEAT, [(name, t.now()) for name in self._names])
        # A gateway of an earlier version has reservations without a beat.
        rows = t.all("SELECT DISTINCT gateway FROM gateway_reservations WHERE is_open = 1")
        beats: dict[str, float | None] = {str(name): None for (name,) in rows}
        beats |= {str(name): float(beat) for name, beat in t.all("SELECT name, beat FROM gateway_holders")}
        return beats
