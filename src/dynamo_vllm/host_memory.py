"""Names the host memory in which an engine keeps KV caches, and removes that of killed engines.

vLLM makes it a file named by the engine's id. Our tiers take the name away when all processes of the engine
have mapped it, at the end of the start; if the start is ended before, the file stays, and its memory with it.
So the worker removes it at its own end, and holds a lock of the same name: what has no lock belongs to a
killed worker. That is right also where this folder outlives a container, or where several share it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path("/dev/shm")
"""Where vLLM has it."""
_ID = re.compile("dynamo-vllm-[0-9a-f]{32}")


@contextlib.contextmanager
def new_engine_id() -> Iterator[str]:
    """Yields the id of a new engine; at the end, its host memory goes if it still has a name."""
    name = f"dynamo-vllm-{uuid.uuid4().hex}"
    made = FOLDER / f"{name}.new"
    try:
        lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StartError(
            f"{FOLDER}, where vLLM keeps KV caches in host memory, cannot be written: {exc.strerror}; change "
            "its rights, or leave out --kv-offload-gb, --kv-offload-disk and --connector offload"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(made, _lock_of(name))  # nobody sees it unlocked
        yield name
    finally:
        _remove(name)
        os.close(lock)


def sweep() -> None:
    """Removes what killed engines of this user left."""
    names = set()
    for path in FOLDER.glob("*dynamo-vllm-*"):
        found = _ID.search(path.name)
        with contextlib.suppress(OSError):  # just removed
            if found and path.suffix in (".lock", ".mmap") and path.lstat().st_uid == os.getuid():
                names.add(found[0])
    for name in names:
        with contextlib.suppress(OSError):  # its worker lives
            _remove_unlocked(name)


def _remove_unlocked(name: str) -> None:
    try:
        lock = os.open(_lock_of(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # removed before a process of the dying engine made its memory
        _remove(name)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(name)
    finally:
        os.close(lock)


def _remove(name: str) -> None:
    for path in [*FOLDER.glob(f"vllm_offload_{name}*.mmap"), _lock_of(name)]:  # one for each rank
        path.unlink(missing_ok=True)


def _lock_of(name: str) -> Path:
    return FOLDER / f"{name}.lock"
