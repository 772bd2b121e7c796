"""Files and folders that are this user's alone, also where others can write beside them, as in /tmp."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user only."""
    missing = [folder, *folder.parents]
    while missing and os.path.lexists(missing[-1]):
        missing.pop()
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def make_own(folder: Path, remedy: str) -> None:
    """The same for a folder with a known name: refused where somebody else could have put things into it."""
    try:
        make(folder)
        found = folder.lstat()
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be made: {exc.strerror}; {remedy}") from None
    if not is_own_folder(found):
        raise ConfigError(f"{folder} could be another user's; remove it, or {remedy}")


def is_own_folder(found: os.stat_result) -> bool:
    """What `lstat` says of a folder in which nobody else can write; a link is none."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def opened(path: Path, flags: int, *, of_anyone: bool = False) -> int:
    """The descriptor of a plain file of this user; whatever else is there raises an OSError, and no wait."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or not (of_anyone or found.st_uid == os.getuid()):
        os.close(descriptor)
        raise PermissionError(1, "it is no file of this user", str(path))
    return descriptor


def write(path: Path, text: str) -> None:
    """A new file that only this user can read, in the place of whatever had its name."""
    path.unlink(missing_ok=True)
    with os.fdopen(opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(text)
