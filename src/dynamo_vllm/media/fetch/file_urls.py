"""Reads file: URLs, of regular files below one folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.fetch.http import too_many_bytes

_OUTSIDE = "the file is not below the folder that this worker may read"


def read_file(url: str, folder: Path | None, max_bytes: int) -> bytes:
    """Blocks. Reveals nothing outside the folder, not even whether it exists."""
    if folder is None:
        raise MediaRefused("file: is not allowed here; an operator allows a folder with --media-folder")
    root = folder.resolve()
    try:
        found = _path(url).resolve()
        if not found.is_relative_to(root):
            raise MediaRefused(_OUTSIDE)
        # Not blocking: opening a pipe would wait for a writer.
        handle = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
        raise MediaRefused("there is no such file, or it cannot be read") from None
    try:
        return _read(handle, root, max_bytes)
    finally:
        os.close(handle)


def _read(handle: int, root: Path, max_bytes: int) -> bytes:
    # Check the opened file, not the path: a folder on the way may be a link by now.
    if not Path(os.readlink(f"/proc/self/fd/{handle}")).is_relative_to(root):
        raise MediaRefused(_OUTSIDE)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise MediaRefused("this is not a regular file")
    if found.st_size > max_bytes:
        raise too_many_bytes(max_bytes)
    with open(handle, "rb", closefd=False) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise too_many_bytes(max_bytes)
    return data


def _path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path, errors="strict") if parts.netloc in ("", "localhost") else ""
    if not path.startswith("/") or "\0" in path or parts.query or parts.fragment:
        raise MediaRefused("this is not a file URL; write file:///folder/name")
    return Path(path)
