"""Creates files and folders for this user only, also where others can write beside them, as in /tmp."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path) -> None:
    """Create a folder, and missing ones above it, for this user only."""
    missing = [folder, *folder.parents]
    while missing and os.path.lexists(missing[-1]):
        missing.pop()
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def make_own(folder: Path, remedy: str) -> None:
    """The same for a folder with a known name: rejected if somebody else could have put files into it."""
    try:
        make(folder)
        found = folder.lstat()
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be created: {exc.strerror}; {remedy}") from None
    if not is_own_folder(found):
        raise ConfigError(f"{folder} may belong to another user; remove it, or {remedy}")


def is_own_folder(found: os.stat_result) -> bool:
    """Return what `lstat` says of a folder in which no other user can write; a link is rejected."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def open_file(path: Path, flags: int, *, of_anyone: bool = False) -> int:
    """Return the descriptor of a regular file of this user; anything else raises an OSError,
    without waiting.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or not (of_anyone or found.st_uid == os.getuid()):
        os.close(descriptor)
        raise PermissionError(1, "not a regular file of this user", str(path))
    return descriptor


def write(path: Path, text: str) -> None:
    """Create a file that only this user can read, replacing whatever had its name."""
    path.unlink(missing_ok=True)
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(text)
