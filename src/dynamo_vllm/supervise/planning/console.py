"""Plans the web console of a `serve`: one process, without which everything else goes on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.config import build, topology
from dynamo_vllm.config.options import ConsoleOptions, ConsoleSettings, WorkerOptions
from dynamo_vllm.serving.watch import request_trace
from dynamo_vllm.supervise.planning.process import COMMAND, Process, reachable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from dynamo_vllm.config.options import FrontendOptions
    from dynamo_vllm.config.topology import Topology

NAME = "console"
NOT_FOR_IT = ("DYN_VLLM_STATUS_FD", "DYN_VLLM_URL", "DYN_VLLM_RUN_DIR")
"""Variables that would send it to another deployment."""
TOKEN, DATABASE = "DYN_VLLM_ADMIN_TOKEN", "DYN_VLLM_GATEWAY_DATABASE"


@dataclass(frozen=True, slots=True)
class ConsolePlace:
    """Where the console of a `serve` on this machine is, and what it may do."""

    settings: ConsoleSettings
    port: int
    """Where it listens."""
    folder: Path
    """The run folder."""
    trace_url: str | None = None
    """Where frontends send the console their records of ended requests."""
    database: str | None = None
    """Of a gateway with keys."""
    gateway_socket: str | None = None
    """Where the gateway passes requests on to the console; None if it does not."""
    gateway_host: str | None = None
    spare_port: int | None = None
    """A reserved one, if `port` is only the usual one."""

    @property
    def is_named(self) -> bool:
        """Return whether the user has chosen the port."""
        return bool(self.settings.console_port)


def beside(place: ConsolePlace, named: Collection[int]) -> ConsolePlace:
    """Return the place at its spare port if the usual one is among those of other processes."""
    if place.port not in named or place.spare_port is None:
        return place
    return dataclasses.replace(place, port=place.spare_port)


def url_of(place: ConsolePlace) -> str:
    return f"http://{reachable(place.settings.console_host)}:{place.port}/"


def process(
    place: ConsolePlace,
    front: FrontendOptions,
    env: Mapping[str, str],
    url: str,
    frontend_url: str,
    token: str | None,
) -> Process:
    """Return the process; `url` is the deployment's, `token` that of the workers' admin verbs."""
    settings = place.settings
    given = {item.name: getattr(settings, item.name) for item in build.declared(ConsoleSettings)}
    given |= {
        "console_port": place.port,
        "namespace": front.namespace,
        "serve_folder": str(place.folder),
        "gateway_socket": place.gateway_socket,
        "gateway_host": place.gateway_host,
        "url": url,
        "frontend": (frontend_url,),
    }
    named = {name: value for name, value in given.items() if value not in (None, (), False)}
    ours = {name: value for name, value in env.items() if name not in NOT_FOR_IT}
    address = url_of(place)
    ours |= for_frontend(place)
    if place.database is not None:
        ours[DATABASE] = place.database
    return Process(
        name=NAME,
        argv=(*COMMAND, "console", *topology.to_argv(ConsoleOptions, named)),
        env=ours if token is None else {**ours, TOKEN: token},
        health=f"{address}live",
        port=place.port,
        drain_seconds=0.0,
        role=None,
        is_essential=False,
        url=address,
    )


def for_frontend(place: ConsolePlace | None) -> dict[str, str]:
    """Return what frontends, and the console itself, are told of the place for records of requests."""
    return {} if place is None or place.trace_url is None else {request_trace.VARIABLE: place.trace_url}


def token_of(wanted: Topology, environment: Mapping[str, str]) -> str | None:
    """Return the token of the first workers that have one."""
    for group in wanted.workers:
        given = {name: value for name, value in group.options.items() if name == "admin_token"}
        found = build.from_values(WorkerOptions, given, {**environment, **group.env}).admin_token
        if found is not None:
            return found
    return None
