"""Keeps the logs of a `serve` from growing without end.

Processes write straight into their files, so that nothing between can stop them: no reader that stands still,
no full disk. A file that has become too large is copied aside and emptied under its writer, who appends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_STEP_BYTES = 1 << 20
_COPY = ".new"


@dataclass(frozen=True, slots=True)
class LogFiles:
    """How large a log may become, and how many older parts of it stay."""

    folder: Path
    max_bytes: int
    keep: int

    async def look(self) -> list[Path]:
        """Put aside what is too large; the logs that begin anew."""
        begun = []
        for log in self._too_large():
            with contextlib.suppress(OSError):  # there is no room: the next look may do it
                await self._put_aside(log)
                begun.append(log)
        return begun

    def _too_large(self) -> list[Path]:
        found = []
        with contextlib.suppress(OSError):  # somebody cleared them away
            for log in self.folder.glob("*.log"):
                if 0 < self.max_bytes < log.stat().st_size:
                    found.append(log)  # noqa: PERF401  # what was found before one went away
        return found

    async def _put_aside(self, log: Path) -> None:
        if not self.keep:
            os.truncate(log, 0)
            return
        copy = part(log, _COPY)
        try:
            await _move(log, copy)
        except OSError:
            self._drop_oldest(log)
            raise
        for number in range(self.keep, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(part(log, f".{number - 1}"), part(log, f".{number}"))
        os.replace(copy, part(log, ".1"))

    def _drop_oldest(self, log: Path) -> None:
        """Makes room."""
        for number in range(self.keep, 0, -1):
            if (oldest := part(log, f".{number}")).exists():
                return oldest.unlink(missing_ok=True)


def part(log: Path, suffix: str) -> Path:
    """worker-1.log.1 is the newest of the older parts."""
    return log.with_name(log.name + suffix)


async def _move(log: Path, copy: Path) -> None:
    """Copy what there is and empty the log; a line that is written in that very moment may be lost."""
    try:
        with log.open("rb") as source, copy.open("wb") as target:
            most = 2 * os.fstat(source.fileno()).st_size  # of one that is written as fast as it is read
            while source.tell() < most and (step := source.read(_STEP_BYTES)):
                target.write(step)
                if len(step) == _STEP_BYTES:
                    await asyncio.sleep(0)  # others wait for us
            target.flush()
            os.truncate(log, 0)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(copy)
        raise
