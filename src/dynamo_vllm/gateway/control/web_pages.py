"""Keeps web pages away from a gateway without keys, as the console does: a browser sends no key unasked.

A page that somebody opens can send requests to every port of the machine, and a name that an attacker made
point at 127.0.0.1 lets it read the answers too. Programs send none of the headers that are looked at here,
but Host.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCALHOST = "localhost"
OTHER_SITES = ("cross-site", "same-site")
EVERY_ORIGIN = "*"


@dataclass(frozen=True, slots=True)
class WebPages:
    """Which pages may use a gateway without keys."""

    host: str = ""
    """Where the gateway listens; empty if that is not known."""
    origins: tuple[str, ...] = ()
    """Of `--cors-origin`."""

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise GatewayError for a request that a page of somebody else makes."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if is_loopback(self.host) and not is_loopback(name_of(host)):
            raise GatewayError(
                421,
                f"{host!r} is not a name of this gateway, which listens on {self.host}; use that address",
                code="misdirected_request",
            )
        if EVERY_ORIGIN in self.origins or (origin and origin in self.origins):
            return
        is_foreign = bool(origin) and host_of(origin) != host.lower()
        if is_foreign or headers.get("sec-fetch-site", "").lower() in OTHER_SITES:
            raise GatewayError(
                403,
                "this request comes from a web page of another origin"
                + (f" ({origin}); allow it with --cors-origin" if origin else ""),
                code="cross_origin_request",
            )


def host_of(origin: str) -> str:
    """Return the host and port of an origin in small letters; nothing for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback(name: str) -> bool:
    """Return whether only this machine has the name or address."""
    if name.lower().rstrip(".") == LOCALHOST:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
