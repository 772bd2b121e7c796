"""Finds the address by which other machines reach this one, if the user named none."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
_FAR = ("192.0.2.1", 9)
"""An address reserved for documentation: behind the default route, and unused."""


def own_address() -> str:
    """Choose as the runtime does: the address of the default route, of the first network, or loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_FAR)  # sends nothing
        except OSError:
            return next(_interfaces(), LOOPBACK)
        return str(probe.getsockname()[0])


def _interfaces() -> Iterator[str]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if name in up and found.family == socket.AF_INET and not found.address.startswith("127."):
                yield found.address
