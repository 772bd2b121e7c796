"""Keeps records that no gateway has taken yet in a file, so that a killed worker loses none.

A record is written before the client gets the last token of its answer. The file of a worker is locked while
the worker lives; the next worker that starts here takes over those of killed ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import uuid
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.config import private
from dynamo_vllm.serving.usage.record import UsageRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_SUFFIX = ".usage"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UsageRecord).decode


class Spool:
    """The file of one worker; it is created with the first record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Not its process id alone: in containers every worker may have the same one.
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex}{_SUFFIX}"
        self._file: int | None = None
        self._has_failed = False

    def append(self, record: UsageRecord) -> None:
        """Write a record; a full disk costs no more than what a kill would lose."""
        encoded = _encode(record)
        try:
            if self._file is None:
                self._file = self._open()
            os.write(self._file, _LENGTH.pack(len(encoded)) + encoded)
        except OSError as exc:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("usage records cannot be kept in %s: %s", self._folder, exc.strerror)

    def empty(self) -> None:
        """All records were taken."""
        if self._file is not None:
            os.ftruncate(self._file, 0)

    def close(self, *, is_empty: bool) -> None:
        if self._file is not None:
            if is_empty:
                self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        private.make(self._folder)
        file = private.open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def has_left(self) -> bool:
        """Return whether there are files of other workers, killed or running."""
        return any(path != self._path for path in self._folder.glob(f"*{_SUFFIX}"))

    def left_behind(self) -> Iterator[tuple[list[UsageRecord], LeftFile]]:
        """Yield the records of workers that are gone, each with its file, which is locked meanwhile."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError):  # in use, or just removed
                file = private.open_file(path, os.O_RDWR)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(file)
                    continue
                yield list(read(path)), LeftFile(path, file)


class LeftFile:
    """The file of a worker that is gone."""

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file = file

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def leave(self) -> None:
        """Leave it for another worker."""
        os.close(self._file)


def read(path: Path) -> Iterator[UsageRecord]:
    """Yield the records of a file; the last one may be cut off."""
    data = path.read_bytes()
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        with contextlib.suppress(msgspec.DecodeError):
            if at + length <= len(data):
                yield _decode(data[at : at + length])
        at += length
