"""Sets the runtime's environment variables from our options. The Rust side reads some at import."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dynamo_vllm.config import private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import ReachOptions, RuntimeOptions

_SYSTEM_PORT = "DYN_SYSTEM_PORT"
_HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
MESSAGE_BYTES = 64 << 20
"""The largest request that one process sends another over TCP."""
_THREADS = "DYN_RUNTIME_NUM_WORKER_THREADS"
# The runtime writes two INFO lines per request, and an ERROR for every probe of a worker that is not ready;
# an operator wants them when debugging only.
_WARN = "warn,tower_http=off"
_LOG = {"error": "error,tower_http=off", "warning": _WARN, "info": _WARN, "debug": "debug"}


def export(
    options: RuntimeOptions, environment: Mapping[str, str], threads: int, service: str, **more: str
) -> None:
    """Set the variables before `dynamo` is imported; `more` are further ones of one process.

    `service` is the name of this process in traces.
    """
    make_discovery_folder(options)
    ours = {**variables(options), **traces(options), **more}
    os.environ.update(ours)
    for name, value in {**defaults(options), _THREADS: str(threads), "OTEL_SERVICE_NAME": service}.items():
        if name not in environment and name not in ours:
            os.environ[name] = value


def export_caller(options: ReachOptions, environment: Mapping[str, str], threads: int = 1) -> None:
    """For a process that only calls others. It may run in a worker's container, whose ports are taken."""
    make_discovery_folder(options)
    quiet = {"DYN_HEALTH_CHECK_ENABLED": "false", "OTEL_EXPORT_ENABLED": "0"}
    os.environ.update({**reach(options), _SYSTEM_PORT: "-1", **quiet})
    for name, value in {**hosts(options), "DYN_LOG": "off", _THREADS: str(threads)}.items():
        if name not in environment:
            os.environ[name] = value


def export_reach(options: ReachOptions) -> None:
    """For a process whose next runtime is to look elsewhere."""
    os.environ.update(reach(options))


def export_quiet(environment: Mapping[str, str]) -> None:
    """For a process that uses a part of the runtime alone, which would log every step."""
    if "DYN_LOG" not in environment:
        os.environ["DYN_LOG"] = "off"


def make_discovery_folder(options: ReachOptions) -> None:
    """For this user only: anyone who can write there can redirect requests and answers.

    A folder that the user named may be shared.
    """
    if options.discovery_folder is not None and options.file_kv is None:
        private.make_own(options.discovery_folder, "name a folder with --file-kv")
    elif options.discovery_folder is not None:
        with contextlib.suppress(OSError):  # the runtime reports what is wrong with it
            private.make(options.discovery_folder)


def variables(options: RuntimeOptions) -> dict[str, str]:
    """Return the variables of our options, which already include the user's environment."""
    found = {**reach(options), "DYN_EVENT_PLANE": options.event_plane}
    if options.etcd_lease_seconds is not None:
        found["ETCD_LEASE_TTL"] = str(options.etcd_lease_seconds)
    if options.event_plane == "nats":
        found["NATS_SERVER"] = options.nats_server
    if options.system_host:
        found["DYN_SYSTEM_HOST"] = options.system_host
    if options.system_port is not None:
        found[_SYSTEM_PORT] = str(options.system_port)
    if options.runtime_threads is not None:
        found[_THREADS] = str(options.runtime_threads)
    return found


def traces(options: RuntimeOptions) -> dict[str, str]:
    """OpenTelemetry's own, which vLLM reads too; the first is the runtime's switch."""
    if options.otlp_endpoint is None:
        return {}
    return {
        "OTEL_EXPORT_ENABLED": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": options.otlp_endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": options.otlp_protocol,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": options.otlp_protocol,
    }


def http_exports(options: RuntimeOptions) -> list[str]:
    """Return where spans and log lines go with HTTP; gRPC knows no proxy."""
    if options.otlp_endpoint is None or options.otlp_protocol == "grpc":
        return []
    return [f"{options.otlp_endpoint.rstrip('/')}/v1/{signal}" for signal in ("traces", "logs")]


def reach(options: ReachOptions) -> dict[str, str]:
    found = {
        "DYN_NAMESPACE": options.namespace,
        "DYN_DISCOVERY_BACKEND": options.discovery_backend,
        "DYN_REQUEST_PLANE": options.request_plane,
    }
    if options.discovery_folder is not None:
        found["DYN_FILE_KV"] = str(options.discovery_folder)
    if options.discovery_backend == "etcd":
        found["ETCD_ENDPOINTS"] = options.etcd_endpoints
    if options.request_plane == "nats":
        found["NATS_SERVER"] = options.nats_server
    return found


PLANES = ("discovery_backend", "file_kv", "etcd_endpoints", "request_plane", "nats_server", "event_plane")
"""The options that all processes of a deployment must have alike."""


def planes(options: RuntimeOptions) -> dict[str, str]:
    """Return the discovery and plane variables, without those of a single process."""
    found = {**reach(options), "DYN_EVENT_PLANE": options.event_plane}
    return {name: value for name, value in found.items() if name != "DYN_NAMESPACE"} | {
        "ETCD_ENDPOINTS": options.etcd_endpoints,
        "NATS_SERVER": options.nats_server,
    }


def hosts(options: ReachOptions) -> dict[str, str]:
    if not options.bind_host:
        return {}
    found = dict.fromkeys(_HOSTS, options.bind_host)
    if options.bind_host in LOOPBACK_HOSTS:
        # NIXL's network transport takes any device, also one that goes away; shared memory is none.
        found["UCX_NET_DEVICES"] = "lo"
    return found


def defaults(options: RuntimeOptions) -> dict[str, str]:
    """Defaults that follow from our options, unless the user's environment sets them."""
    found = {
        "DYN_LOG": _LOG[options.log_level],
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        # With RUST_BACKTRACE=1, which many images set, the runtime's first error on a closed connection would
        # read its symbols into 66 MB of memory. Panics still show theirs.
        "RUST_LIB_BACKTRACE": "0",
        "VLLM_LOGGING_LEVEL": options.log_level.upper(),
        # The runtime's own 32 MiB are too few for a file of 25 MB in base64, and for what the frontend takes.
        "DYN_TCP_MAX_MESSAGE_SIZE": str(MESSAGE_BYTES),
    }
    if options.otlp_endpoint is not None:
        # The runtime sends its log lines there too; of a receiver that takes none it complains each time.
        found["OTEL_BLRP_SCHEDULE_DELAY"] = "60000"
    if options.system_port is None:
        found["DYN_SELF_HOST_METADATA"] = "0"  # the model card is handed out over the system port
    if options.request_plane == "nats":
        # The runtime's own 10 s fail all requests of an outage of that length, and set their workers aside.
        found["DYN_NATS_REQUEST_TIMEOUT_SECS"] = "20"
    return found | hosts(options)


def worker_threads(cores: int) -> int:
    """Enough for a worker. Every message wakes a sleeping thread; with few threads one is usually awake.

    One per core, the runtime's default, took a tenth more CPU per token on 2 cores, a quarter on 16. But a
    thread that waits for Python's lock does nothing else: on 16 cores two admit a burst of requests faster.
    """
    return max(1, min(4, cores // 8))


def frontend_threads(cores: int) -> int:
    """As for a worker, with room for long prompts beside the streams."""
    return max(2, min(8, cores // 4))
