"""Describes whom Envoy connects to: the frontends, the control app, its own admin server, the console."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_vllm.gateway.envoy import console
from dynamo_vllm.gateway.envoy.routes import CONTROL, FRONTEND
from dynamo_vllm.gateway.envoy.words import Json, address, typed

if TYPE_CHECKING:
    from dynamo_vllm.gateway.envoy.settings import EnvoySettings

CONNECTION_BYTES = 256 << 10


def every(s: EnvoySettings) -> list[Json]:
    found = [frontend(s), _on_pipe(CONTROL, s.control_socket, s.max_connections)]
    found.append(_on_pipe("admin", s.admin_socket, 100))
    if s.console_socket is not None:
        found.append(_on_pipe(console.CONSOLE, s.console_socket, console.MOST_REQUESTS))
    return found


def frontend(s: EnvoySettings) -> Json:
    split = [urlsplit(url) for url in s.frontends]
    found: Json = {
        "name": FRONTEND,
        "type": "STRICT_DNS",
        "connect_timeout": "2s",
        "lb_policy": "LEAST_REQUEST",
        "per_connection_buffer_limit_bytes": CONNECTION_BYTES,
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": s.max_connections * 2,
                    "max_pending_requests": s.max_connections * 2,
                    "max_requests": s.max_connections * 2,
                    "max_retries": 1000,
                }
            ]
        },
        "load_assignment": {
            "cluster_name": FRONTEND,
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": address(url.hostname or "", _port(url.scheme, url.port))}}
                        for url in split
                    ]
                }
            ],
        },
    }
    if len(split) > 1:  # a frontend that is gone gets no requests for a while
        found["outlier_detection"] = {
            "consecutive_local_origin_failure": 2,
            "split_external_local_origin_errors": True,
            "base_ejection_time": "5s",
            "consecutive_5xx": 0,
        }
    if split[0].scheme == "https":
        found["transport_socket"] = typed(
            "envoy.transport_sockets.tls", "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        )
    return found


def _port(scheme: str, port: int | None) -> int:
    return port or (443 if scheme == "https" else 80)


def _on_pipe(name: str, path: str, most: int) -> Json:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": most,
                    "max_pending_requests": most,
                    "max_requests": most,
                    "max_retries": most,
                }
            ]
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": path}}}}]}],
        },
    }
