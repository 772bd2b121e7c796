"""Finds the lines of a batch's file that have no answer yet, and reads each when it can be sent."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.batches import lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READ_AHEAD = 64
READ_AHEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Where a line is: what waits keeps this, and not its text of up to 45 MiB."""

    number: int
    start: int
    length: int


class Source:
    """The lines without an answer, for whoever needs the next."""

    def __init__(self, path: Path, answered: set[int]) -> None:
        self._file = path.open("rb")
        self._answered = answered
        self._numbered: Iterator[tuple[int, bytes]] = lines.numbered(self._file)
        self._ahead: list[LinePlace] = []
        self._lock = asyncio.Lock()
        self._closed = threading.Lock()

    async def next(self) -> LinePlace | None:
        async with self._lock:
            if not self._ahead:
                self._ahead = await asyncio.to_thread(self._find)
            return self._ahead.pop() if self._ahead else None

    async def read(self, place: LinePlace) -> bytes:
        return await asyncio.to_thread(self._read, place)

    def close(self) -> None:
        with self._closed:
            self._file.close()

    def _find(self) -> list[LinePlace]:
        places: list[LinePlace] = []
        size = 0
        with self._closed:
            while not self._file.closed and len(places) < READ_AHEAD and size < READ_AHEAD_BYTES:
                numbered = next(self._numbered, None)
                if numbered is None:
                    break
                number, line = numbered
                if number not in self._answered:
                    places.append(LinePlace(number, self._file.tell() - len(line), len(line)))
                    size += len(line)
        return places[::-1]

    def _read(self, place: LinePlace) -> bytes:
        with self._closed:  # a closed descriptor may be another file's by now
            return b"" if self._file.closed else os.pread(self._file.fileno(), place.length, place.start)
