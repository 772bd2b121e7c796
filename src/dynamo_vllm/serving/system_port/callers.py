"""Decides who may call verbs on the system port."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_vllm.errors import NotAllowed

if TYPE_CHECKING:
    from email.message import Message

    from dynamo_vllm.serving.admin.endpoint import Admin

_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")


class Unauthorized(NotAllowed):
    status = 401


def check(admin: Admin, address: str, headers: Message) -> None:
    """With a token, callers that send it; without one, programs on this machine, but no page in a browser.

    A page's requests carry its Origin, or with DNS rebinding its own name for this machine.
    """
    if admin.has_token:
        kind, _, token = headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not admin.is_token(token.strip()):
            raise Unauthorized("send the admin token as 'Authorization: Bearer TOKEN'")
    elif not is_loopback(address):
        raise NotAllowed(
            "verbs are accepted only from this machine; start the worker with --admin-token for others"
        )
    elif any(name in headers for name in _OF_PROXIES):
        raise NotAllowed(
            "verbs are not accepted through a proxy; start the worker with --admin-token for that"
        )
    elif "Origin" in headers or not is_own_name(headers.get("Host", "")):
        raise NotAllowed(
            "verbs are not accepted from a browser; use localhost or the address of this machine"
        )


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def is_own_name(host: str) -> bool:
    """Return whether a Host header names this machine by an address, or by a name that needs no DNS."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in ("", "localhost", socket.gethostname().lower()):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
