"""Finds the servers that a deployment needs, checks that they answer, and how to log in to etcd."""

from __future__ import annotations

import ipaddress
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_vllm.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import ReachOptions

REACH_SECONDS = 3.0
BUSY_FOLDER = "FileStore mutation lock"
"""The runtime (1.6.1) says this when it could not lock the folder of file discovery in about a second."""
_CONNECT_SECONDS = 2.0
_PORTS = {"http": 2379, "https": 2379, "nats": 4222, "tls": 4222}


@dataclass(frozen=True, slots=True)
class Server:
    """One of the two servers, with all its addresses."""

    name: str
    flag: str
    why: str
    """The option that selects it."""
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Where etcd is and how to log in, from the variables that the runtime reads."""

    endpoints: tuple[str, ...]
    username: str | None = None
    password: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


def servers(o: ReachOptions, event_plane: str = "zmq") -> list[Server]:
    """Return the servers that the options select."""
    found = []
    if o.discovery_backend == "etcd":
        found.append(
            Server("etcd", "--etcd-endpoints", "--discovery-backend etcd", addresses(o.etcd_endpoints))
        )
    uses = {"--request-plane": o.request_plane, "--event-plane": event_plane}
    if asking := [f"{flag} nats" for flag, plane in uses.items() if plane == "nats"]:
        found.append(Server("NATS", "--nats-server", " and ".join(asking), addresses(o.nats_server)))
    return found


def addresses(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def check_addresses(flag: str, text: str, schemes: tuple[str, ...]) -> None:
    """Raise ConfigError for what the runtime would not understand."""
    for address in addresses(text) or ("",):
        try:
            parts = urlsplit(address)
            is_known = parts.scheme in schemes and parts.hostname is not None and parts.port != 0
        except ValueError:
            is_known = False
        if not is_known:
            example = f"{schemes[0]}://HOST:{_PORTS[schemes[0]]}"
            raise ConfigError(f"{flag} {address!r} is not the address of a server; write {example}")


def etcd_access(o: ReachOptions, environment: Mapping[str, str]) -> EtcdAccess | None:
    """Return None if discovery is not in etcd."""
    if o.discovery_backend != "etcd":
        return None
    names = ("USERNAME", "PASSWORD", "CA", "CLIENT_CERT", "CLIENT_KEY")
    found = (environment.get(f"ETCD_AUTH_{name}") or None for name in names)
    return EtcdAccess(addresses(o.etcd_endpoints), *found)


def is_on_this_machine(servers: list[Server]) -> bool:
    """Return whether no other machine can reach any of them."""
    return all(_is_loopback(address) for server in servers for address in server.addresses)


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_unreachable(servers: list[Server], seconds: float = REACH_SECONDS) -> None:
    """Report at once that a server is down: the runtime would wait two minutes."""
    deadline = time.monotonic() + seconds
    for server in servers:
        while reasons := _unreachable(server):
            if time.monotonic() > deadline:
                raise StartError(
                    f"{server.name} does not answer at {', '.join(reasons)}; {server.why} needs it. "
                    f"Start it, or give its address with {server.flag}"
                )
            time.sleep(0.2)


def _unreachable(server: Server) -> list[str]:
    """Return the errors of all addresses; none if one of them answers."""
    reasons = []
    for address in server.addresses:
        parts = urlsplit(address)
        try:
            port = parts.port or _PORTS[parts.scheme]
            socket.create_connection((str(parts.hostname), port), _CONNECT_SECONDS).close()
            return []
        except OSError as exc:
            host = str(parts.hostname)  # not the address: it may contain a password
            reasons.append(f"{host}:{port} ({exc.strerror or exc})")
    return reasons
