"""Holds what the console must know of its deployment and of itself."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS

if TYPE_CHECKING:
    from dynamo_vllm.supervise.run_folder import RunFolder

WILDCARDS = ("0.0.0.0", "::")
DEFAULT_PORTS = (80, 443)
"""Ports that browsers leave out of the Host header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The same from the start to the end of the process."""

    host: str
    port: int
    url: str
    """Where clients of the deployment go."""
    frontends: tuple[str, ...]
    """Where the figures of frontends are read."""
    namespace: str = "dynamo"
    names: tuple[str, ...] = ()
    """Further names of this server."""
    read_only: bool = False
    token: str | None = None
    """What a user must give to log in; None lets everybody in who reaches the port, unless keys log in."""
    admits_keys: bool = False
    """Whether a key of the gateway with --admin logs in too."""
    prefix: str = "/"
    """The path below which browsers see the page."""
    folder: RunFolder | None = None
    """Of the `serve` on this machine; None for a deployment elsewhere."""
    grafana: str | None = None

    @property
    def needs_login(self) -> bool:
        """Whether there is a token: without a login the console would lend it to every caller."""
        return self.token is not None or self.admits_keys

    @property
    def is_behind_gateway(self) -> bool:
        """Whether Envoy passes these requests on, and says who the client is."""
        return self.prefix != "/"

    @property
    def cookie(self) -> str:
        """Cookies belong to a host with all of its ports, so the port is part of the name."""
        return f"console-{self.port}"

    def is_named(self, host: str) -> bool:
        """Return whether a Host header names this server.

        Another name may belong to a page that an attacker made point here. Addresses cannot be made to, so
        a server on all of them accepts each.
        """
        name, port = split_host(host.lower())
        if name in (known.lower().strip("[]") for known in self.names):
            return True  # a proxy in front may have another port
        if port != self.port and not (port is None and self.port in DEFAULT_PORTS):
            return False
        if name in LOOPBACK_HOSTS or name == self.host.lower():
            return True
        return self.host in WILDCARDS and _is_address(name)


def split_host(host: str) -> tuple[str, int | None]:
    """Return name and port of a Host header; the port is None if there is none, or no number."""
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        name, _, port = host.partition(":")
    return name, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
