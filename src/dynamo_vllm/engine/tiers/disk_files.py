"""Stores chunks of KV caches as files in a folder that one process at a time has locked.

    PATH/dynamo-vllm-kv/FINGERPRINT/SLOT/lock           held by a living process
                                        /chunks/ab/…    files of chunks, named by their keys
                                        /after-reset-1/ the same, of no use to another process
                                        /parts/         files that are being written

A fingerprint stands for everything that the values in a chunk depend on, so chunks of one model never reach
another. A process takes the first slot that nobody holds: a restarted one finds the files of the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import struct
import time
import zlib
from typing import TYPE_CHECKING

from dynamo_vllm.config import private
from dynamo_vllm.config.options.kv_cache import OWN_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

FOLDER = OWN_FOLDER
FORMAT = 1
"""Counts the changes of the files' layout."""
_BLOCK_BYTES = 4096
_MAGIC = b"dynvllmK"
_HEADER = struct.Struct("<8sHHIQ32s")
"""Magic, format, length of the key, checksum, length of the chunk, fingerprint; the key follows."""
_LOCK, _PARTS, _SUFFIX = "lock", "parts", ".kv"
_FINGERPRINT, _SLOT = re.compile("[0-9a-f]{32}"), re.compile("[0-9]{1,4}")
_NAME = re.compile(rf"((?:[0-9a-f][0-9a-f])+){re.escape(_SUFFIX)}")
_MOST_SLOTS = 1000
_numbers = itertools.count()
"""Of files being written; of the whole process, so that a late thread never meets a file of its own name."""


class Damaged(Exception):
    """Is raised if a file is not the chunk that its name says; the text says why."""


class Chunks:
    """Reads and writes the files of one folder of chunks. Each method waits for the disk."""

    def __init__(self, folder: str, parts: str, fingerprint: str, chunk_bytes: int) -> None:
        self.folder = folder
        self._parts, self._fingerprint, self._chunk_bytes = parts, fingerprint.encode(), chunk_bytes

    def path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}{_SUFFIX}"

    def write(self, key: bytes, payload: memoryview, is_wanted: Callable[[], bool]) -> bool:
        """Writes one chunk; returns False, and leaves no file, if it is no longer wanted at the end."""
        part, path = f"{self._parts}/{next(_numbers)}", self.path(key)
        try:
            _write_file(part, [self._header(key, payload), payload])
            if not is_wanted():
                return False
            try:
                os.rename(part, path)
            except (
                FileNotFoundError
            ):  # the first chunk there; if the folder above is gone too, that is an error
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path), 0o700)
                os.rename(part, path)
            return True
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)

    def read(self, key: bytes, payload: memoryview) -> None:
        """Reads one chunk into the caller's buffer. Raises Damaged, or OSError."""
        header = bytearray(_HEADER.size + len(key))
        whole = len(header) + len(payload)
        descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # A byte more than there should be tells a longer file without another call.
            found = _read_into(descriptor, [memoryview(header), payload, memoryview(bytearray(1))], whole)
        finally:
            os.close(descriptor)
        if found != whole:
            raise Damaged(f"it is {'longer' if found > whole else 'shorter'} than {whole} bytes")
        self._check(header, key, payload)

    def remove(self, key: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(key))

    def is_there(self) -> bool:
        return os.path.isdir(self.folder)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks chunks as recently used for the next process."""
        for key in keys:
            with contextlib.suppress(OSError):
                os.utime(self.path(key))

    def scan(self) -> list[bytes]:
        """Returns the keys of all files, the least recently used first; removes what cannot be a chunk."""
        found: list[tuple[int, bytes]] = []
        for entry in _entries_below(self.folder):
            name = _NAME.fullmatch(entry.name)
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat(follow_symlinks=False)
                key = bytes.fromhex(name[1]) if name else b""
                if key and about.st_size == _HEADER.size + len(key) + self._chunk_bytes:
                    found.append((about.st_mtime_ns, key))
                else:
                    os.unlink(entry.path)
        return [key for _, key in sorted(found)]

    def _header(self, key: bytes, payload: memoryview) -> memoryview:
        fields = (FORMAT, len(key), self._checksum(key, payload), len(payload), self._fingerprint)
        return memoryview(_HEADER.pack(_MAGIC, *fields) + key)

    def _checksum(self, key: bytes, payload: memoryview) -> int:
        return zlib.crc32(payload, zlib.crc32(self._fingerprint + key))

    def _check(self, header: bytearray, key: bytes, payload: memoryview) -> None:
        magic, form, key_bytes, checksum, length, fingerprint = _HEADER.unpack_from(header)
        if (magic, form) != (_MAGIC, FORMAT):
            raise Damaged("it has another format")
        if fingerprint != self._fingerprint or key_bytes != len(key) or header[_HEADER.size :] != key:
            raise Damaged("it is another chunk")
        if length != len(payload) or checksum != self._checksum(key, payload):
            raise Damaged("its checksum is wrong")


def file_bytes(chunk_bytes: int) -> int:
    """Returns the room that one chunk takes on a disk."""
    whole = _HEADER.size + 64 + chunk_bytes
    return -(-whole // _BLOCK_BYTES) * _BLOCK_BYTES


class Slot:
    """A folder below a fingerprint that this process has locked."""

    def __init__(self, path: Path, lock: int, fingerprint: str, chunk_bytes: int) -> None:
        self.path, self._lock = path, lock
        self._fingerprint, self._chunk_bytes = fingerprint, chunk_bytes

    @classmethod
    def take(cls, root: Path, fingerprint: str, chunk_bytes: int) -> Slot:
        """Takes a slot that has files and no owner, or else a new one. Raises OSError."""
        base = _own_folder(root)
        above = base / fingerprint
        above.mkdir(mode=0o700, exist_ok=True)
        there = sorted(int(name) for name in os.listdir(above) if _SLOT.fullmatch(name))
        with _undisturbed(base):
            for number in (*there, *(n for n in range(_MOST_SLOTS) if n not in there)):
                path = above / str(number)
                if (lock := _locked(path)) is not None:
                    now = time.time_ns()
                    os.utime(lock, ns=(now, now))
                    return cls(path, lock, fingerprint, chunk_bytes)
        raise FileExistsError(17, "all slots are taken", str(above))

    def is_ours(self) -> bool:
        """Returns whether the folder is still there, and not another one in its place."""
        return _is_same(self._lock, self.path / _LOCK)

    def tidy(self, generation: int) -> Chunks:
        """Returns the chunks of a generation; removes all others, and what an interrupted write left.

        Generation 0 has the values that the fingerprint stands for. The engine may have had other weights
        since its first reset, so what it stored after one is of no use to another process.
        """
        name = f"after-reset-{generation}" if generation else "chunks"
        for entry in list(os.scandir(self.path)):
            if entry.name not in (_LOCK, name):
                _remove(entry)
        for folder in (name, _PARTS):
            (self.path / folder).mkdir(mode=0o700, exist_ok=True)
        parts = str(self.path / _PARTS)
        return Chunks(str(self.path / name), parts, self._fingerprint, self._chunk_bytes)

    def prove(self) -> float:
        """Writes a file of a chunk's size to the disk and reads it; returns the seconds. Raises OSError."""
        begun, path = time.monotonic(), f"{self.path}/{_PARTS}/{next(_numbers)}"
        try:
            # Zeros take no room where files are compressed.
            _write_file(path, [memoryview(os.urandom(self._chunk_bytes))], is_synced=True)
            with open(path, "rb") as file:
                file.read()
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return time.monotonic() - begun

    def close(self) -> None:
        """Lets another process have the folder."""
        with contextlib.suppress(OSError):
            os.close(self._lock)


def unowned(root: Path) -> set[tuple[Path, int]]:
    """Returns the slots that no process has, of all fingerprints, and when each was last taken."""
    base = root / FOLDER
    found: set[tuple[Path, int]] = set()
    for above in list(os.scandir(base)):
        if _FINGERPRINT.fullmatch(above.name) and above.is_dir(follow_symlinks=False):
            slots = (base / above.name / slot.name for slot in list(os.scandir(above.path)))
            free = (slot for slot in slots if _SLOT.fullmatch(slot.name) and _is_free(slot))
            found |= {(slot, (slot / _LOCK).stat().st_mtime_ns) for slot in free}
    return found


def remove_unowned(path: Path) -> bool:
    """Removes a slot; returns False if a process has it by now."""
    lock = _locked(path)
    if lock is None:
        return False
    try:
        for entry in list(os.scandir(path)):
            if entry.name != _LOCK:
                _remove(entry)
        os.unlink(path / _LOCK)
        with contextlib.suppress(OSError):  # somebody wants it again, or another slot is beside it
            os.rmdir(path)
            os.rmdir(path.parent)
    finally:
        os.close(lock)
    return True


def _own_folder(root: Path) -> Path:
    """Makes our folder below the user's; in a place like /tmp another user may have made it before."""
    private.make(root)
    base = root / FOLDER
    base.mkdir(mode=0o700, exist_ok=True)
    if not private.is_own_folder(base.lstat()):
        raise PermissionError(1, "it may belong to another user", str(base))
    return base


def _locked(path: Path) -> int | None:
    """Returns the descriptor of a slot's lock; None if another process has it."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = private.open_file(path / _LOCK, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # it is being removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        if _is_same(descriptor, path / _LOCK):
            return descriptor
        os.close(descriptor)  # its owner before us has removed it


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_free(path: Path) -> bool:
    with _undisturbed(path.parent.parent):
        lock = _locked(path)
        if lock is not None:
            os.close(lock)
    return lock is not None


@contextlib.contextmanager
def _undisturbed(base: Path) -> Iterator[None]:
    """Keeps a look at a slot, which locks it for a moment, apart from who wants a slot with its files."""
    descriptor = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)


def _entries_below(folder: str) -> Iterator[os.DirEntry[str]]:
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            yield from list(os.scandir(entry.path))


def _write_file(path: str, parts: list[memoryview], *, is_synced: bool = False) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while parts:
            parts = _after(parts, os.writev(descriptor, parts))
        if is_synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)  # NFS may tell only here that the disk is full


def _read_into(descriptor: int, parts: list[memoryview], enough: int) -> int:
    """Reads up to the end of the file or `enough` bytes; returns how many there were."""
    found = 0
    while found < enough and (count := os.preadv(descriptor, parts, found)):
        found, parts = found + count, _after(parts, count)
    return found


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Returns the parts without their first `count` bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []
