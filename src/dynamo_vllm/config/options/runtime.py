"""Options of every process: how it finds and reaches the others, and how it runs."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_vllm.config.build import opt

DISCOVERY_BACKENDS = ("file", "mem", "etcd", "kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachOptions:
    """How a process finds and reaches the others."""

    namespace: str = opt("dynamo", "runtime", "Namespace of the deployment.", env="DYN_NAMESPACE")
    discovery_backend: str = opt(
        "file",
        "runtime",
        "Where workers and frontends find each other: in a folder of one machine, in etcd, or in the "
        "Kubernetes API; mem is one process by itself.",
        env="DYN_DISCOVERY_BACKEND",
        flags=("--discovery-backend", "--store-kv"),
        choices=DISCOVERY_BACKENDS,
    )
    file_kv: str | None = opt(
        None,
        "runtime",
        "Folder of the file discovery backend; shared by every process of a deployment on one machine "
        "(default: one of this user's, below the folder for temporary files).",
        env="DYN_FILE_KV",
        metavar="FOLDER",
    )
    etcd_endpoints: str = opt(
        "http://localhost:2379",
        "runtime",
        "Addresses of etcd, for its discovery backend, separated by commas.",
        env="ETCD_ENDPOINTS",
        metavar="URLS",
    )
    request_plane: str = opt(
        "tcp",
        "runtime",
        "Transport of requests: straight to the worker, or through a NATS server.",
        env="DYN_REQUEST_PLANE",
        choices=("tcp", "nats"),
    )
    nats_server: str = opt(
        "nats://localhost:4222",
        "runtime",
        "Address of the NATS server, for either plane; several are separated by commas.",
        env="NATS_SERVER",
        metavar="URL",
    )
    bind_host: str | None = opt(
        None,
        "runtime",
        "Address this process binds and advertises; 127.0.0.1 keeps all traffic on this machine. "
        "Unset: the machine's own address.",
        env="DYN_VLLM_BIND_HOST",
        metavar="ADDRESS",
    )

    @property
    def discovery_folder(self) -> Path | None:
        """Where the file backend keeps its files. The runtime's own choice would be one for all users."""
        if self.discovery_backend != "file":
            return None
        return Path(self.file_kv or Path(tempfile.gettempdir(), f"dynamo-vllm-discovery-{os.getuid()}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions(ReachOptions):
    """A process others can reach too."""

    event_plane: str = opt(
        "zmq",
        "runtime",
        "Transport of KV events and load figures: straight from the worker, or through a NATS server.",
        env="DYN_EVENT_PLANE",
        choices=("zmq", "nats"),
    )
    etcd_lease_seconds: int | None = opt(
        None,
        "runtime",
        "How long etcd lists this process after its last sign of life (default: 30, a frontend 120). Without "
        "etcd it lives for half of that time at least, then ends.",
        env="ETCD_LEASE_TTL",
        metavar="SECONDS",
    )
    system_host: str | None = opt(
        None, "runtime", "Address of the health and metrics server.", env="DYN_SYSTEM_HOST", metavar="ADDRESS"
    )
    system_port: int | None = opt(
        None,
        "runtime",
        "Port of /health, /live and /metrics; 0 takes a free one, unset serves none.",
        env="DYN_SYSTEM_PORT",
        metavar="PORT",
    )
    runtime_threads: int | None = opt(
        None,
        "runtime",
        "Threads of the Rust runtime in this process (default: few; more cost CPU for every token).",
        env="DYN_RUNTIME_NUM_WORKER_THREADS",
        metavar="N",
    )
    log_level: str = opt(
        "info",
        "runtime",
        "How much to log.",
        env="DYN_VLLM_LOG_LEVEL",
        choices=("error", "warning", "info", "debug"),
    )
    otlp_endpoint: str | None = opt(
        None,
        "traces",
        "Send a trace of every request to the OpenTelemetry receiver at this address, for example "
        "http://127.0.0.1:4317; unset sends none.",
        env="OTEL_EXPORTER_OTLP_ENDPOINT",
        metavar="URL",
    )
    otlp_protocol: str = opt(
        "grpc",
        "traces",
        "What the receiver speaks: receivers have grpc at port 4317 and http/protobuf at 4318.",
        env="OTEL_EXPORTER_OTLP_PROTOCOL",
        choices=("grpc", "http/protobuf"),
    )
    status_fd: int | None = opt(
        None,
        "runtime",
        "File descriptor that gets one JSON line per phase of the start.",
        env="DYN_VLLM_STATUS_FD",
        metavar="FD",
        hidden=True,
    )

    @property
    def traces_url(self) -> str | None:
        """Where spans go: over HTTP they have a path of their own."""
        if self.otlp_endpoint is None or self.otlp_protocol == "grpc":
            return self.otlp_endpoint
        return f"{self.otlp_endpoint.rstrip('/')}/v1/traces"


def admin_token() -> Any:
    """The option of the workers, which ask for it, and of the commands, which send it."""
    return opt(
        None,
        "admin",
        "Token that admin verbs must carry. A worker without one does over HTTP what processes of its own "
        "machine ask for, and nothing for others.",
        env="DYN_VLLM_ADMIN_TOKEN",
        metavar="TOKEN",
        secret=True,
    )
