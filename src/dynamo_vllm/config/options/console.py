"""Options of the web console."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.admin import FindOptions


@dataclass(frozen=True, kw_only=True)  # without slots: a class cannot have two bases that have some
class ConsoleSettings:
    """Where the console listens and what it allows; `serve` has these options too."""

    console_host: str = opt(
        "127.0.0.1",
        "console",
        "Address of the web console. One that other machines can reach needs --admin-token, with which one "
        "logs in.",
        env="DYN_VLLM_CONSOLE_HOST",
        metavar="ADDRESS",
    )
    console_port: int | None = opt(
        None,
        "console",
        "Port of the web console (default: the one after the port of the deployment's URL, or a free one if "
        "that is taken).",
        env="DYN_VLLM_CONSOLE_PORT",
        metavar="PORT",
    )
    console_read_only: bool = opt(
        False,
        "console",
        "Refuse everything in the console that changes something, and its load tests.",
        env="DYN_VLLM_CONSOLE_READ_ONLY",
    )
    console_hosts: tuple[str, ...] = opt(
        (),
        "console",
        "Further names by which browsers reach the console, for example behind a proxy; requests for other "
        "names are refused.",
        env="DYN_VLLM_CONSOLE_HOSTS",
        metavar="NAME",
        repeats=True,
    )
    console_grafana: str | None = opt(
        None,
        "console",
        "Address of a Grafana with the dashboards of this deployment; the console links to it.",
        env="DYN_VLLM_CONSOLE_GRAFANA",
        metavar="URL",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions(ConsoleSettings, FindOptions):
    """A web page that shows a deployment, tries it and operates it."""

    url: str | None = opt(
        None,
        "deployment",
        "URL of the deployment, as clients use it (default: that of the serve on this machine, else "
        "http://127.0.0.1:8000).",
        env="DYN_VLLM_URL",
        metavar="URL",
    )
    frontend: tuple[str, ...] = opt(
        (),
        "deployment",
        "URL of a frontend, where its figures are read; may be given several times (default: --url).",
        env="DYN_VLLM_CONSOLE_FRONTEND",
        metavar="URL",
        repeats=True,
    )
    request_trace_url: str | None = opt(
        None,
        "deployment",
        "Where this console receives the frontends' records of ended requests, which explain routing: an "
        "address on this machine with a path that nobody guesses, the same as --request-trace-url of the "
        "frontends. serve sets it.",
        env="DYN_VLLM_REQUEST_TRACE_URL",
        metavar="URL",
        secret=True,
    )
    database: str | None = opt(
        None,
        "deployment",
        "Database of the gateway, for keys and usage; only with an admin token.",
        env="DYN_VLLM_GATEWAY_DATABASE",
        metavar="URL",
        secret=True,
    )
    gateway_socket: str | None = opt(
        None,
        "deployment",
        "Unix socket on which requests come that a gateway got below /console/; serve sets it.",
        env="DYN_VLLM_CONSOLE_GATEWAY_SOCKET",
        metavar="FILE",
        hidden=True,
    )
    gateway_host: str = opt(
        "127.0.0.1",
        "deployment",
        "Address on which that gateway listens.",
        env="DYN_VLLM_CONSOLE_GATEWAY_HOST",
        metavar="ADDRESS",
        hidden=True,
    )
    serve_folder: str | None = opt(
        None,
        "deployment",
        "Run folder of the serve that started this console.",
        env="DYN_VLLM_CONSOLE_SERVE_FOLDER",
        metavar="FOLDER",
        hidden=True,
    )
    log_level: str = opt(
        "info",
        "console",
        "How much the console logs.",
        env="DYN_VLLM_CONSOLE_LOG_LEVEL",
        choices=("error", "warning", "info", "debug"),
    )
    status_fd: int | None = opt(
        None,
        "console",
        "File descriptor that gets one JSON line per phase of the start.",
        env="DYN_VLLM_STATUS_FD",
        metavar="FD",
        hidden=True,
    )
