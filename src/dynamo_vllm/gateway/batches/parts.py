"""Writes answers to part files and puts them together at the end.

Every gateway that runs a batch appends to a part of its own, and then writes down in the database which piece
of it answers which line. A piece that is not written down there, because its writer was killed in between or
lost the batch, is never read: an answer is in the output once, however often its line was run.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, BinaryIO

from dynamo_vllm.gateway.batches.lines import custom_id_of, numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    Pieces = Sequence[tuple[int, str, int, int, bool]]
    """Number, part, start, length and kind of answered lines."""


class Part:
    """The end of a file that only this process writes to."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (folder / name).open("ab")
        self._end = self._file.tell()

    @property
    def size(self) -> int:
        return self._end

    def append(self, answers: Iterable[bytes]) -> list[int]:
        """Write answers and return where each starts; they outlive this process."""
        starts = []
        for answer in answers:
            starts.append(self._end)
            self._file.write(answer)
            self._end += len(answer)
        self._file.flush()
        return starts

    def close(self) -> None:
        self._file.close()


def lost(folder: Path, pieces: Pieces) -> list[tuple[int, bool]]:
    """Return the lines whose answers are not in their files, as after a loss of power."""
    sizes: dict[str, int] = {}
    found = []
    for number, part, start, length, is_error in pieces:
        if part not in sizes:
            path = folder / part
            sizes[part] = path.stat().st_size if path.exists() else 0
        if start + length > sizes[part]:
            found.append((number, is_error))
    return found


def put_together(folder: Path, pieces: Pieces, output: Path, errors: Path) -> tuple[int, int]:
    """Write the output and the errors in the order of the lines; return their sizes."""
    opened: dict[str, BinaryIO] = {}
    try:
        with output.open("wb") as good, errors.open("wb") as bad:
            for _, part, start, length, is_error in pieces:
                if part not in opened:
                    opened[part] = (folder / part).open("rb")
                opened[part].seek(start)
                (bad if is_error else good).write(opened[part].read(length))
            for file in (good, bad):
                file.flush()
                os.fsync(file.fileno())
            return good.tell(), bad.tell()
    finally:
        for source in opened.values():
            source.close()


def add_unanswered(
    path: Path, numbers: set[int], errors: Path, line_of: Callable[[int, str | None], bytes]
) -> tuple[int, int]:
    """Add an error for every line that has no answer; return how many, and the size of the errors."""
    count = 0
    with path.open("rb") as source, errors.open("ab") as bad:
        for number, text in numbered(source):
            if number not in numbers:
                bad.write(line_of(number, custom_id_of(text)))
                count += 1
        bad.flush()
        os.fsync(bad.fileno())
        return count, bad.tell()


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
