"""What processes listen on, as the kernel tells it (sock_diag): addresses, and devices of sockets."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_SOCK_DIAG, _DONE, _DUMP_REQUEST, _LISTEN = 20, 3, 0x301, 1 << 10
_HEADER, _MESSAGE = struct.Struct("=IHHII"), struct.Struct("=4B2s2s16s16sI8s5I")


@dataclass(frozen=True, slots=True)
class Listener:
    pid: int
    address: str
    port: int
    device: int
    """Its number; 0 where it hears all of them."""

    @property
    def is_for_this_machine(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback or self.device == socket.if_nametoindex("lo")


def listeners(pids: Collection[int]) -> list[Listener]:
    """Of these processes, TCP over IPv4 and IPv6, on whichever host they are."""
    owners = {inode: pid for pid in pids for inode in _sockets(pid)}
    found = [
        row
        for namespace in {_network(pid): pid for pid in pids}.values()
        for family in (socket.AF_INET, socket.AF_INET6)
        for row in _table(family, namespace)
    ]
    return [
        Listener(owners[inode], address, port, device)
        for inode, address, port, device in found
        if inode in owners
    ]


def _network(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has ended since
        return os.readlink(f"/proc/{pid}/ns/net")
    return os.readlink("/proc/self/ns/net")


def _sockets(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def _kernel(pid: int) -> socket.socket:
    """Asks the kernel about the network in which a process is."""
    if _network(pid) == os.readlink("/proc/self/ns/net"):
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)

    def ask() -> socket.socket:
        # For this thread alone; a socket stays where it was made.
        with open(f"/proc/{pid}/ns/net", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


def _table(family: int, pid: int) -> list[tuple[int, str, int, int]]:
    """Inode, address, port and device of every socket that listens, in the network of a process."""
    request = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 0, 0, _LISTEN)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG, _DUMP_REQUEST, 1, 0)
    found: list[tuple[int, str, int, int]] = []
    with _kernel(pid) as kernel:
        kernel.send(header + request)
        while True:
            data = kernel.recv(1 << 20)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return found
                fields = _MESSAGE.unpack_from(data, _HEADER.size)
                size = 4 if family == socket.AF_INET else 16
                address = socket.inet_ntop(family, fields[6][:size])
                found.append((fields[-1], address, int.from_bytes(fields[4], "big"), fields[8]))
                data = data[(length + 3) & ~3 :]


def for_other_machines(pids: Collection[int]) -> list[Listener]:
    """Those of several processes that may be reached from elsewhere."""
    found = listeners(pids)
    assert len({one.pid for one in found}) > 1
    return [one for one in found if not one.is_for_this_machine]
