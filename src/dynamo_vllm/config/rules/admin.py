"""Rules for the options of the commands that call workers, and of the web console."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_vllm.config.options.admin import CACHES, SLEEP_LEVELS, DrainOptions, ResetOptions, SleepOptions
from dynamo_vllm.config.rules import flags
from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import AdminOptions, ConsoleSettings, FindOptions, WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?")


def token_can_be_sent(o: WorkerOptions | FindOptions, _: EngineFlags | None = None) -> None:
    """An empty token would allow every caller."""
    if o.admin_token == "":
        raise ConfigError("--admin-token is empty; give one, or leave it out")
    if o.admin_token is not None and not all("!" <= char <= "~" for char in o.admin_token):
        raise ConfigError(
            "--admin-token must consist of ASCII letters, digits and punctuation, without spaces"
        )


def deployment_is_named_once(o: FindOptions) -> None:
    if o.run_dir is not None and o.file_kv is not None:
        raise ConfigError(
            f"--run-dir {o.run_dir} and --file-kv {o.file_kv} (or DYN_FILE_KV) name two deployments; "
            "give one of them"
        )


def run_folders_have_files(o: FindOptions) -> None:
    if o.run_dir is not None and o.discovery_backend != "file":
        raise ConfigError(
            f"--run-dir {o.run_dir} needs file discovery, not --discovery-backend {o.discovery_backend}; "
            "leave one of them out"
        )


def others_can_be_found(o: FindOptions) -> None:
    if o.discovery_backend == "mem":
        raise ConfigError(
            "--discovery-backend mem works inside one process only; use the backend of the workers"
        )


def one_worker_or_all(o: AdminOptions) -> None:
    if o.all and o.worker is not None:
        raise ConfigError(f"--all and --worker {o.worker} cannot be combined; give one of them")


def wait_has_time(o: AdminOptions) -> None:
    if o.timeout is not None and not o.timeout > 0:  # false for NaN too
        raise ConfigError(f"--timeout {o.timeout} must be above 0")


def sleep_has_a_level(o: AdminOptions) -> None:
    if isinstance(o, SleepOptions) and o.level not in SLEEP_LEVELS:
        raise ConfigError(f"--level {o.level} is unknown; 1 keeps the weights, 2 drops them")


def drain_is_not_negative(o: AdminOptions) -> None:
    if not isinstance(o, DrainOptions) or o.drain_seconds is None:
        return
    if not math.isfinite(o.drain_seconds) or o.drain_seconds < 0:
        raise ConfigError(f"--drain-seconds {o.drain_seconds} must be 0 or more, and finite")


def caches_are_known(o: AdminOptions) -> None:
    for kind in o.kind if isinstance(o, ResetOptions) else ():
        if kind not in CACHES:
            raise ConfigError(f"--kind {kind} is unknown; choose from {', '.join(CACHES)}")


# --- the web console ---------------------------------------------------------------------------------------


def console_has_a_port(o: ConsoleSettings, _: str | None) -> None:
    if o.console_port is not None:
        flags.port_is_a_port("--console-port", o.console_port)


def others_log_in(o: ConsoleSettings, token: str | None) -> None:
    if o.console_host not in LOOPBACK_HOSTS and not token:
        raise ConfigError(
            f"--console-host {o.console_host} lets other machines operate this deployment; give "
            "--admin-token, with which one logs in, or leave out --console-host"
        )


def console_hosts_are_names(o: ConsoleSettings, _: str | None) -> None:
    for name in o.console_hosts:
        if not _HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"--console-hosts {name}: give the name of a host, without http://, port or path"
            )


def grafana_is_an_address(o: ConsoleSettings, _: str | None) -> None:
    if o.console_grafana is None:
        return
    parts = urlsplit(o.console_grafana)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--console-grafana {o.console_grafana} is not the address of a page; write http://host:port/path"
        )


FIND_RULES = (deployment_is_named_once, run_folders_have_files, others_can_be_found, token_can_be_sent)
WORKER_RULES = (token_can_be_sent,)
RULES = (one_worker_or_all, wait_has_time, sleep_has_a_level, drain_is_not_negative, caches_are_known)
CONSOLE_RULES = (console_has_a_port, others_log_in, console_hosts_are_names, grafana_is_an_address)
