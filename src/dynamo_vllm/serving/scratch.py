"""Creates a worker's folder for sockets and metrics, removes it at the end, and those of killed workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import private
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "dynamo-vllm-"
_LOCK = "in-use"


@contextlib.contextmanager
def folder(within: str | None = None) -> Iterator[str]:
    """Create a new one, locked until the last process of this worker ends; `within` is not TMPDIR."""
    try:
        if within is not None:
            os.makedirs(within, exist_ok=True)
        sweep(within)
        made = tempfile.mkdtemp(prefix=PREFIX, dir=within)
    except OSError as exc:
        fix = "set TMPDIR to a folder" if within is None else f"name another folder than {within},"
        raise StartError(
            f"cannot create a temporary folder: {exc.strerror}; "
            f"free disk space, or {fix} that can be written to"
        ) from None
    with open(os.path.join(made, "new"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, os.path.join(made, _LOCK))  # nobody sees it unlocked
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def sweep(within: str | None = None) -> None:
    """Remove what killed workers of this user left; other users may have folders of such names too."""
    for left in Path(within or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or just removed
            if not private.is_own_folder(left.lstat()):
                continue
            with open(private.open_file(left / _LOCK, os.O_RDONLY)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
