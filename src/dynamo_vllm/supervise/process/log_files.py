"""Rotates the logs of a `serve`.

Processes write directly to their files, so that no stopped reader and no full disk can block them. A file
that is too large is copied and truncated while its writer appends.
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
    """How large a log may become, and how many rotated parts to keep."""

    folder: Path
    max_bytes: int
    keep: int

    async def look(self) -> list[Path]:
        """Rotate logs that are too large; return those."""
        begun = []
        for log in self._too_large():
            with contextlib.suppress(OSError):  # the disk is full: the next check may succeed
                await self._put_aside(log)
                begun.append(log)
        return begun

    def _too_large(self) -> list[Path]:
        found = []
        with contextlib.suppress(OSError):  # somebody removed them
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
        """Free disk space."""
        for number in range(self.keep, 0, -1):
            if (oldest := part(log, f".{number}")).exists():
                return oldest.unlink(missing_ok=True)


def part(log: Path, suffix: str) -> Path:
    """worker-1.log.1 is the newest rotated part."""
    return log.with_name(log.name + suffix)


async def _move(log: Path, copy: Path) -> None:
    """Copy the log and truncate it; a line written at that moment may be lost."""
    try:
        with log.open("rb") as source, copy.open("wb") as target:
            most = 2 * os.fstat(source.fileno()).st_size  # for a log that is written as fast as it is read
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
