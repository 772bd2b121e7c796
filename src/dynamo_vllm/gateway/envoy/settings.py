"""Holds everything that Envoy's configuration depends on."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_HEAP_BYTES, MOST_HEAP_BYTES = 512 << 20, 4 << 30


def heap_for(memory_bytes: int) -> int:
    """Return a quarter of the machine's memory, within bounds."""
    return max(LEAST_HEAP_BYTES, min(memory_bytes // 4, MOST_HEAP_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoySettings:
    """Everything that the configuration depends on."""

    host: str
    port: int
    frontends: tuple[str, ...]
    control_socket: str
    admin_socket: str
    console_socket: str | None = None
    """Where the web console listens for requests below /console/; None if it is not to be reached."""
    status_host: str | None = None
    status_port: int | None = None
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    access_log: str | None = None
    ended_pipe: str | None = None
    """Where the ids of requests that have ended are written."""
    max_body_bytes: int = 45 << 20
    header_kb: int = 60
    max_connections: int = 10000
    idle_seconds: float = 300.0
    stream_idle_seconds: float = 600.0
    body_seconds: float = 3600.0
    """For a request to come as a whole: a file of 200 MB at 64 KiB a second, and a turn of a minute."""
    heap_bytes: int = 1 << 30
    """What Envoy may keep of bodies and answers of all clients; it refuses requests above that."""
    trusted_proxies: int = 0
    cors_origins: tuple[str, ...] = ()
