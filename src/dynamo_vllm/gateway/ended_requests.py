"""Hears from Envoy which requests have ended, through a named pipe that both parts open.

The pipe keeps what Envoy wrote while the control app starts again. A line is the id of a request and the
status that its client got; a line that says RESTARTED comes from a new Envoy: the requests of the last one
are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RESTARTED = "restarted"
_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


def create(path: Path) -> None:
    """Create the pipe, for this user only, unless it is there."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)


def tell_restarted(path: Path) -> None:
    """Tell the control app that Envoy starts: it knows nothing of earlier requests."""
    create(path)
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(OSError):
            os.write(file, f"{RESTARTED} 0\n".encode())
    finally:
        os.close(file)


@contextlib.contextmanager
def listening(path: Path, on_line: Callable[[str, int], None]) -> Iterator[None]:
    """Call `on_line` with the id and the status of each request that has ended."""
    create(path)
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # also for writing, so that it never ends
    if not stat.S_ISFIFO(os.fstat(file).st_mode):
        os.close(file)
        raise FileExistsError(f"{path} is not a pipe")
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, _F_SETPIPE_SZ, _BYTES)
    loop = asyncio.get_running_loop()
    rest = b""

    def read() -> None:
        nonlocal rest
        with contextlib.suppress(BlockingIOError):
            *lines, rest = (rest + os.read(file, _BYTES)).split(b"\n")
            for line in lines:
                request_id, _, status = line.decode(errors="replace").partition(" ")
                on_line(request_id, int(status) if status.isdecimal() else 0)

    loop.add_reader(file, read)
    try:
        yield
    finally:
        loop.remove_reader(file)
        os.close(file)
