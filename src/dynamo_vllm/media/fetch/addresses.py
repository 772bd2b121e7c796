"""Decides which hosts and addresses a URL may use: names before DNS, addresses after it.

The connection goes to the checked address (`fetch.py`), so DNS rebinding has no effect.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import MediaRefused

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from dynamo_vllm.config.options.media_reach import MediaReachOptions

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""From a name and a port to addresses."""

# What inet_aton accepts besides four decimal numbers: 2130706433, 0x7f000001, 127.1, 0177.0.0.1.
_ODD_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+)){0,3}\.?", re.IGNORECASE)
# IPv6 addresses that contain an IPv4 address, after so many bits.
_IPV4_CARRIERS = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("::/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
)
# Special addresses that not every Python knows, or that only their use reveals.
_SPECIAL = (
    ipaddress.IPv4Network("192.0.0.0/24"),  # 192.0.0.192 is Oracle Cloud's metadata service
    ipaddress.IPv4Network("192.88.99.0/24"),
    ipaddress.IPv4Network("168.63.129.16/32"),  # public by its number: Azure's host of each machine
)
_SPECIAL_6 = (ipaddress.IPv6Network("2001::/23"), ipaddress.IPv6Network("3fff::/20"))
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
# One message for an unknown name and for a forbidden one: otherwise clients could probe the names of the
# internal network.
_NOT_REACHABLE = "the host is not found, or this worker may not fetch from its address"


@dataclass(frozen=True, slots=True)
class Reach:
    """What an operator allows. Public addresses are allowed unless `hosts` lists a few."""

    hosts: tuple[str, ...] = ()
    """Only these names, if there are any; `*.example.com` includes all subdomains."""
    networks: tuple[Network, ...] = ()
    """Private or special addresses that are allowed."""
    resolve: Resolve | None = None
    """Replaces the machine's own DNS."""
    tls: ssl.SSLContext | None = None
    """Replaces the usual certificate authorities."""

    @classmethod
    def of(cls, options: MediaReachOptions) -> Reach:
        return cls(options.media_hosts, tuple(map(ipaddress.ip_network, options.media_networks)))

    def check_name(self, host: str) -> None:
        """Check before DNS, for the first URL and for each redirect."""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if _ODD_NUMBER.fullmatch(host):
                raise MediaRefused(
                    "the host is an address in an unusual form; write it as four decimal numbers"
                ) from None
        if self.hosts and not any(_covers(pattern, host) for pattern in self.hosts):
            raise MediaRefused("the host is not among those that this worker may fetch from")

    def allows(self, text: str) -> bool:
        """Check after DNS: whether this address is allowed."""
        address = ipaddress.ip_address(text.partition("%")[0])
        if any(_inside(address, network) for network in self.networks):
            return True
        inner = _embedded_ipv4(address)
        if inner is not None:
            return self.allows(str(inner))
        return _is_public(address)


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address not in _PUBLIC_6 or any(address in network for network in _SPECIAL_6):
            return False
    elif any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _covers(pattern: str, host: str) -> bool:
    pattern, host = pattern.lower().rstrip("."), host.lower().rstrip(".")
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _inside(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


def _embedded_ipv4(address: Address) -> ipaddress.IPv4Address | None:
    if isinstance(address, ipaddress.IPv4Address):
        return None
    for network, behind in _IPV4_CARRIERS:
        if address in network:
            return ipaddress.IPv4Address(int(address) >> behind & 0xFFFFFFFF)
    return None


async def resolve_allowed(host: str, port: int, reach: Reach, system: Resolve) -> list[str]:
    """Return the addresses of a name; all must be allowed."""
    try:
        addresses = await (reach.resolve or system)(host, port)
    except (OSError, UnicodeError):
        raise MediaRefused(_NOT_REACHABLE) from None
    if not addresses or not all(reach.allows(address) for address in addresses):
        raise MediaRefused(_NOT_REACHABLE)
    return addresses


def system_resolver(threads: Executor) -> Resolve:
    """The machine's own DNS, in separate threads: a slow name server must not block anything else."""

    async def resolve(host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(threads, _look_up, host, port)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    return resolve


def _look_up(host: str, port: int) -> Sequence[tuple[object, object, object, object, tuple[object, ...]]]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
