"""Turns a topology into the processes that `serve` starts. Pure: nothing is opened, started or
created here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynamo_vllm.config import build, checks, planes, runtime_env, topology, worker_plan
from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.supervise.planning import console as consoles
from dynamo_vllm.supervise.planning import gateway as gateways
from dynamo_vllm.supervise.planning import group_names, tiers
from dynamo_vllm.supervise.planning import secrets as planning_secrets
from dynamo_vllm.supervise.planning.pool import Pool
from dynamo_vllm.supervise.planning.process import COMMAND, LOOPBACK, Plan, Process, reachable
from dynamo_vllm.supervise.planning.workers import WorkerProcesses, parse_group, with_engine_count
from dynamo_vllm.supervise.run_folder import EMBEDDINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dynamo_vllm.config.topology import Topology, WorkerGroup
    from dynamo_vllm.config.worker_plan import WorkerPlan
    from dynamo_vllm.supervise.planning.console import ConsolePlace
    from dynamo_vllm.supervise.planning.gateway import GatewayPlace

_PUBLIC = ("DYN_HTTP_HOST", "DYN_HTTP_PORT", "DYN_TLS_CERT_PATH", "DYN_TLS_KEY_PATH")
"""Variables of the frontend that a gateway in front of it takes."""


def make(
    wanted: Topology,
    environment: Mapping[str, str],
    discovery: Path,
    gpus: Sequence[str] = (),
    *,
    elsewhere: bool = False,
    gateway: GatewayPlace | None = None,
    console: ConsolePlace | None = None,
) -> Plan:
    """Return the processes of a topology; settings that cannot work are rejected here.

    `gpus` are assigned to several workers; without any, each sees what the environment shows. Processes that
    will run `elsewhere` are not checked against this machine. A topology with a gateway needs a place for it,
    and only one with a place for a console has one.
    """
    wanted = group_names.named(wanted, environment)
    wanted, said = tiers.share_out(wanted, environment)
    environment = tiers.without_variables(environment)
    everything = shared_environment(environment, discovery)
    front = build.from_values(FrontendOptions, wanted.frontend, everything)
    checks.check_frontend(front, elsewhere=elsewhere)
    everything = with_planes(everything, front, environment)
    shared = {name: value for name, value in everything.items() if name not in gateways.NOT_FOR_OTHERS}
    front = build.from_values(FrontendOptions, wanted.frontend, shared)
    url = frontend_url = url_of(front)
    beside: tuple[Process, ...] = ()
    if gateway is not None and wanted.gateway is not None:
        beside = gateways.processes(wanted.gateway, front, everything, gateway)
        wanted = dataclasses.replace(
            wanted,
            frontend=gateways.behind(wanted.frontend, gateway),
            workers=tuple(gateways.taking_turns(group, shared) for group in wanted.workers),
        )
        shared = {name: value for name, value in shared.items() if name not in _PUBLIC}
        inner = build.from_values(FrontendOptions, wanted.frontend, shared)
        frontend_url = url_of(inner)
        front, public = inner, front
    else:
        public = front
    words, secrets = topology.to_argv(FrontendOptions, wanted.frontend), dict[str, str]()
    if not elsewhere:
        words, secrets = planning_secrets.by_environment(FrontendOptions, words)
    frontend = Process(
        name="frontend",
        argv=(*COMMAND, "frontend", *words),
        env={**shared, **consoles.for_frontend(console), **secrets},
        health=f"{frontend_url}/live",
        port=front.port,
        drain_seconds=front.drain_seconds,
        role=None,
    )
    several = sum(group.count for group in wanted.workers) > 1
    has_encoders = any(_is_encoder(group, shared) for group in wanted.workers)
    embeddings = discovery.with_name(EMBEDDINGS) if has_encoders else None
    workers = WorkerProcesses(
        wanted.model, shared, environment, gpus, front, embeddings, elsewhere, not several
    )
    if public.port != front.port:  # the same on hosts of their own
        workers.keep_port(public.port, "--port")
    if console is not None and console.is_named:
        workers.keep_port(console.port, "--console-port")
    for group in wanted.workers:
        workers.add(group)
    workers.check_roles()
    if not elsewhere:
        tiers.refuse_more_than_here(workers.plans)
    processes = (frontend, *beside, *with_engine_count(workers.made))
    if console is not None:
        token = consoles.token_of(wanted, shared)
        checks.check_console_settings(console.settings, token)
        if not console.is_named:
            console = consoles.beside(console, workers.named_ports)
            workers.keep_port(console.port, "the console's port")
        processes += (consoles.process(console, front, shared, url, frontend_url, token),)
    return Plan(
        url,
        public.host,
        public.port,
        tuple(workers.models),
        processes,
        front,
        workers.named_ports,
        frontend_url,
        needs_key=bool(beside) and not (wanted.gateway or {}).get("open"),
        said=said,
        pool=Pool(workers),
    )


def url_of(front: FrontendOptions) -> str:
    return f"{'https' if front.tls_cert_path else 'http'}://{reachable(front.host)}:{front.port}"


def shared_environment(environment: Mapping[str, str], discovery: Path) -> dict[str, str]:
    """One machine, no services; the user's environment wins."""
    defaults = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(discovery),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_VLLM_BIND_HOST": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
    }
    # One port cannot serve several processes: each worker gets its own as a flag.
    return {name: value for name, value in {**defaults, **environment}.items() if name != "DYN_SYSTEM_PORT"}


def with_planes(
    shared: Mapping[str, str], front: FrontendOptions, environment: Mapping[str, str]
) -> dict[str, str]:
    """Pass the frontend's discovery and plane settings to the workers too.

    A deployment that other machines can find advertises this machine's address, not loopback.
    """
    found = {**shared, **runtime_env.planes(front)}
    servers = planes.servers(front, front.event_plane)
    is_shared = front.discovery_backend == "kubernetes" or (
        front.discovery_backend == "etcd" and not planes.is_on_this_machine(servers)
    )
    if is_shared and "DYN_VLLM_BIND_HOST" not in environment:
        del found["DYN_VLLM_BIND_HOST"]
    return found


def _is_encoder(group: WorkerGroup, env: Mapping[str, str]) -> bool:
    return parse_group(group.options, group, {**env, **group.env}).options.card.encodes_media


def parse(argv: Sequence[str]) -> WorkerPlan:
    """Return the arguments of a worker's command."""
    return worker_plan.parse(argv, {})
