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
        "Where workers and frontends find each other: a folder of one machine, etcd, or the Kubernetes "
        "API; mem is for a single process.",
        env="DYN_DISCOVERY_BACKEND",
        flags=("--discovery-backend", "--store-kv"),
        choices=DISCOVERY_BACKENDS,
    )
    file_kv: str | None = opt(
        None,
        "runtime",
        "Folder of file discovery, shared by all processes of a deployment on one machine (default: this "
        "user's, in the temporary folder).",
        env="DYN_FILE_KV",
        metavar="FOLDER",
    )
    etcd_endpoints: str = opt(
        "http://localhost:2379",
        "runtime",
        "Addresses of etcd for --discovery-backend etcd, separated by commas.",
        env="ETCD_ENDPOINTS",
        metavar="URLS",
    )
    request_plane: str = opt(
        "tcp",
        "runtime",
        "Transport of requests: directly to the worker, or through a NATS server.",
        env="DYN_REQUEST_PLANE",
        choices=("tcp", "nats"),
    )
    nats_server: str = opt(
        "nats://localhost:4222",
        "runtime",
        "Address of the NATS server, for both planes; separate several by commas.",
        env="NATS_SERVER",
        metavar="URL",
    )
    bind_host: str | None = opt(
        None,
        "runtime",
        "Address this process binds and advertises; 127.0.0.1 keeps all traffic on this machine (default:"
        " the machine's own address).",
        env="DYN_VLLM_BIND_HOST",
        metavar="ADDRESS",
    )

    @property
    def discovery_folder(self) -> Path | None:
        """Return the folder of file discovery. The runtime's own default is shared by all users."""
        if self.discovery_backend != "file":
            return None
        return Path(self.file_kv or Path(tempfile.gettempdir(), f"dynamo-vllm-discovery-{os.getuid()}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions(ReachOptions):
    """A process that others can reach too."""

    event_plane: str = opt(
        "zmq",
        "runtime",
        "Transport of KV events and load: directly from the worker, or through a NATS server.",
        env="DYN_EVENT_PLANE",
        choices=("zmq", "nats"),
    )
    etcd_lease_seconds: int | None = opt(
        None,
        "runtime",
        "How long etcd lists this process after its last heartbeat (default: 30, a frontend 120). Without"
        " etcd the process lives for at least half of that time, then exits.",
        env="ETCD_LEASE_TTL",
        metavar="SECONDS",
    )
    system_host: str | None = opt(
        None, "runtime", "Address of the health and metrics server.", env="DYN_SYSTEM_HOST", metavar="ADDRESS"
    )
    system_port: int | None = opt(
        None,
        "runtime",
        "Port of /health, /live and /metrics; 0 takes a free one (default: none).",
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
        "How much to log; vLLM and the runtime log as much, unless VLLM_LOGGING_LEVEL or DYN_LOG is set.",
        env="DYN_VLLM_LOG_LEVEL",
        choices=("error", "warning", "info", "debug"),
    )
    otlp_endpoint: str | None = opt(
        None,
        "traces",
        "Send a trace of every request to this OpenTelemetry receiver, for example http://127.0.0.1:4317 "
        "(default: none).",
        env="OTEL_EXPORTER_OTLP_ENDPOINT",
        metavar="URL",
    )
    otlp_protocol: str = opt(
        "grpc",
        "traces",
        "Protocol of the receiver: usually grpc on port 4317, http/protobuf on 4318.",
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
        """Return the address for spans; over HTTP it has an extra path."""
        if self.otlp_endpoint is None or self.otlp_protocol == "grpc":
            return self.otlp_endpoint
        return f"{self.otlp_endpoint.rstrip('/')}/v1/traces"


def admin_token() -> Any:
    """Declare the option once for workers, which require it, and for commands, which send it."""
    return opt(
        None,
        "admin",
        "Token that callers of admin verbs must send. A worker without one accepts HTTP calls only from "
        "its own machine.",
        env="DYN_VLLM_ADMIN_TOKEN",
        metavar="TOKEN",
        secret=True,
    )
