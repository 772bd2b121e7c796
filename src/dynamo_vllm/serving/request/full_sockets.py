"""Asks the kernel which connections of this process have full send buffers."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

SIOCOUTQ = 0x5411
"""Bytes in a socket's send queue."""
SO_MEMINFO = 55
"""Nine numbers about a socket's memory: the fourth is the send buffer's size, the sixth what is queued in it.
"""
_NUMBERS = struct.Struct("9I")
_INT = struct.Struct("i")
_ZERO = bytes(_INT.size)
FEW_BYTES = 16 << 10
"""No send buffer is full with less."""
UNKNOWN = 1 << 30
"""More than possible: the caller must not count on room."""


def count_full() -> int:
    """Return the TCP connections whose send buffer is more than half full.

    Linux accepts nothing while a buffer is full, and reports it until a third is free: every blocked writer
    is counted here.
    """
    full, ioctl, int_of = 0, fcntl.ioctl, _INT.unpack
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # no descriptor is left to read it with
        return UNKNOWN
    for name in names:
        try:
            if int_of(ioctl(int(name), SIOCOUTQ, _ZERO))[0] > FEW_BYTES:
                full += is_full(int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
    return full


def is_full(descriptor: int) -> bool:
    borrowed = socket.socket(fileno=descriptor)
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        held = _NUMBERS.unpack(borrowed.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, _NUMBERS.size))
        return bool(held[5] > held[3] // 2)
    finally:
        borrowed.detach()  # it stays open: it belongs to somebody else
