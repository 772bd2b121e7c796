"""Makes a folder for one process inside a folder that several share, and removes those of killed processes.

The shared folder may be on a network. There a lock is not always seen by other machines, nor by another mount
on the same one. So a free lock tells that the owner is gone only to who would see it: the same kernel, with
the same mount. For everybody else the owner is gone once it has not touched its lock for a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from dynamo_vllm.config import private

TOUCH_SECONDS = 60.0
GONE_SECONDS = 24 * 3600.0
_LOCK = "in-use"
_KERNEL = Path("/proc/sys/kernel/random/boot_id")


class OwnedFolder:
    """`path` is this process's until `remove`; raises OSError where it cannot be made or locked."""

    def __init__(self, shared: Path, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=shared))
        self._touched = time.monotonic()
        try:
            self._lock = private.open_file(self.path / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                os.write(self._lock, _seen_by(self._lock))
                (self.path / "new").rename(self.path / _LOCK)  # nobody sees it unlocked
            except BaseException:
                os.close(self._lock)
                raise
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._sweep(shared, prefix)

    def touch(self) -> None:
        """Say that the owner lives, to those who may not see its lock; call it at least every few minutes."""
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            with contextlib.suppress(OSError):  # tried again
                os.utime(self._lock)

    def remove(self) -> None:
        os.close(self._lock)  # first: NFS keeps an open file, and so its folder
        shutil.rmtree(self.path, ignore_errors=True)

    def _sweep(self, shared: Path, prefix: str) -> None:
        """Remove what killed processes of this user left."""
        now = os.fstat(self._lock).st_mtime  # by the clock of the file system
        with contextlib.suppress(OSError):
            for left in shared.glob(f"{prefix}*"):
                # Locks of NFS do not hold against the process that has them.
                if left != self.path and _is_left(left, now):
                    shutil.rmtree(left, ignore_errors=True)


def _is_left(folder: Path, now: float) -> bool:
    """Return whether the owner is gone; False if it lives, is another user, or is not known."""
    try:
        about = folder.lstat()
        if not private.is_own_folder(about):
            return False
        if not (folder / _LOCK).exists():  # its owner was killed while it made the folder
            return now - about.st_mtime > GONE_SECONDS
        with open(private.open_file(folder / _LOCK, os.O_RDWR), "rb") as lock:  # NFS locks only for writers
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = _seen_by(lock.fileno())
            if ours and lock.read() == ours:
                return True
            return now - os.fstat(lock.fileno()).st_mtime > GONE_SECONDS
    except OSError:
        return False


def _seen_by(lock: int) -> bytes:
    """Return the kernel and the mount on which a lock of this file is seen; nothing if not known."""
    try:
        return f"{_KERNEL.read_text().strip()} {os.fstat(lock).st_dev}\n".encode()
    except OSError:
        return b""
