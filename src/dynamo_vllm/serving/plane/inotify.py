"""Checks that this user can still open the inotify instances that file discovery needs."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from dynamo_vllm.errors import StartError

FRONTEND = 20
"""Instances that the runtime (1.6.1) takes for a frontend with one model: 14, with prefill workers 20."""
WORKER = 4
"""A worker takes one, and a few where it calls other workers."""
LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")


def refuse_used_up(instances: int) -> None:
    """Refuse at once: the runtime would fail later without naming inotify, or wait forever."""
    left = count_left(instances)
    if left < instances:
        raise StartError(
            f"file discovery needs {instances} inotify instances, and this user has {left} left of "
            f"{_limit()}; raise the limit: sysctl -w fs.inotify.max_user_instances=1024 "
            "(or use --discovery-backend etcd)"
        )


def count_left(instances: int) -> int:
    """Return how many of these this user can still open."""
    opened: list[int] = []
    try:
        while len(opened) < instances:
            opened.append(_open())
    except OSError as exc:
        if exc.errno != errno.EMFILE or not _can_open_files():
            return instances  # no inotify here, or no file descriptors: the runtime says what it misses
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return len(opened)


def _open() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    return descriptor


def _can_open_files() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def _limit() -> str:
    try:
        return LIMIT.read_text().strip()
    except OSError:
        return "an unknown number"
