"""What a process does first that tests fork from a zygote (`dynamo_vllm.forking`)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMESPACES = Path("/var/run/netns")
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
_RECURSIVE_SLAVE, _DETACH = 0x4000 | 0x80000, 2


def run(fds: Sequence[int], call: str, args: Sequence[Any], namespace: str | None) -> int:
    """Call `module:function` on the named host, if any; its output goes to the descriptor that came along."""
    for number in (1, 2):
        os.dup2(fds[0], number)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if namespace is not None:
        enter(namespace)
    module, _, name = call.partition(":")
    return int(getattr(importlib.import_module(module), name)(*args) or 0)


def enter(namespace: str) -> None:
    """Moves this process, which has one thread, to a host, and /sys with it, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: object) -> None:
        if getattr(libc, name)(*args) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    with (NAMESPACES / namespace).open("rb") as entry:
        call("setns", entry.fileno(), _NEW_NETWORK)
    call("unshare", _NEW_MOUNTS)
    call("mount", b"", b"/", b"none", ctypes.c_ulong(_RECURSIVE_SLAVE), None)
    with contextlib.suppress(OSError):  # where there is none
        call("umount2", b"/sys", _DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)
