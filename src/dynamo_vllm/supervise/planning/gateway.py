"""Plans the two processes of a gateway: Envoy where clients connect, the control app beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.config import build, model_kind, topology
from dynamo_vllm.config.options import GatewayOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing import config_file
from dynamo_vllm.supervise.planning.process import COMMAND, LOOPBACK, Process
from dynamo_vllm.supervise.planning.workers import parse_group

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynamo_vllm.config.options import FrontendOptions
    from dynamo_vllm.config.topology import Topology, Values, WorkerGroup

MOVED = ("host", "port", "tls_cert_path", "tls_key_path")
"""Options of the frontend that are the gateway's where there is one."""
SCHEDULING = "--scheduling-policy"
NOT_FOR_OTHERS = ("VLLM_API_KEY", "DYN_VLLM_GATEWAY_DATABASE")
"""Variables that no other process needs to know."""


@dataclass(frozen=True, slots=True)
class GatewayPlace:
    """Where the parts of a gateway on this machine are."""

    folder: str
    """For sockets; its name must be short."""
    frontend_port: int
    envoy_status_port: int
    control_status_port: int
    console_socket: str | None = None
    """Where Envoy reaches the web console; None if it must not."""


def needing(wanted: Topology, environment: Mapping[str, str]) -> list[str]:
    """Return the models with APIs that only a gateway serves, as far as their folders are on this machine:
    those that score pairs of texts, and those that transcribe.
    """
    values = {"model": wanted.model} if wanted.model is not None else {}
    found = []
    for group in wanted.workers:
        plan = parse_group({**values, **group.options}, group, {**environment, **group.env})
        options, flags = plan.options, plan.flags
        folder = _folder(str(options.model), environment)
        kind = options.card.kind
        if kind == model_kind.GENERATE and options.disaggregation_mode is None and not options.omni:
            kind = model_kind.kind_of(folder, flags)
        pairs = kind == model_kind.POOLING and model_kind.scores_pairs(folder, flags)
        if pairs or kind == model_kind.TRANSCRIPTION:
            found.append((options.served_model_name or (str(options.model),))[0])
    return list(dict.fromkeys(found))


def _folder(model: str, environment: Mapping[str, str]) -> str:
    """Return the folder of a model, also of one in the hub's cache."""
    try:
        return str(config_file.find(model, environment).parent)
    except ConfigError:
        return model


def open_for_all(environment: Mapping[str, str], folder: Path, data: Path) -> dict[str, object]:
    """Return the settings of a gateway without keys, which keeps nothing beyond this `serve` by itself."""
    made = {"open": True, "database": f"sqlite:///{folder / 'gateway.db'}", "data_dir": str(data)}
    variables = {item.name: item.option.env for item in build.declared(GatewayOptions)}
    return {name: value for name, value in made.items() if not environment.get(variables[name])}


def behind(values: Values, place: GatewayPlace) -> dict[str, object]:
    """Return the options of a frontend that only the gateway can reach."""
    kept = {name: value for name, value in values.items() if name not in MOVED}
    return {**kept, "host": LOOPBACK, "port": place.frontend_port}


def taking_turns(group: WorkerGroup, env: Mapping[str, str]) -> WorkerGroup:
    """Return workers whose engines take requests by priority, so that tenants take turns there too."""
    options = parse_group(group.options, group, {**env, **group.env}).options
    has_policy = any(word.startswith(SCHEDULING) for word in group.args)
    if options.omni or options.engine != "vllm" or has_policy:
        return group
    return dataclasses.replace(group, args=(*group.args, SCHEDULING, "priority"))


def processes(
    values: Values, public: FrontendOptions, env: Mapping[str, str], place: GatewayPlace
) -> tuple[Process, Process]:
    """Return the control app and Envoy."""
    given = {
        **values,
        "host": public.host,
        "port": public.port,
        "max_body_mb": public.max_body_mb,
        "frontend": (f"http://{LOOPBACK}:{place.frontend_port}",),
        "gateway_dir": place.folder,
        "drain_seconds": public.drain_seconds,
        "namespace": public.namespace,
    }
    if place.console_socket is not None:
        given["console_socket"] = place.console_socket
    for name in ("tls_cert_path", "tls_key_path"):
        if (path := getattr(public, name)) is not None:
            given[name] = path
    build.from_values(GatewayOptions, given, env)  # refuses what has the wrong type
    words = topology.to_argv(GatewayOptions, given)
    secrets = topology.secrets(GatewayOptions, values)
    ours = {**{name: value for name, value in env.items() if name != "DYN_VLLM_STATUS_FD"}, **secrets}

    def process(name: str, part: str, port: int, drain_seconds: float) -> Process:
        return Process(
            name=name,
            argv=(*COMMAND, "gateway", *words, f"--part={part}", f"--status-port={port}"),
            env=ours,
            health=f"http://{LOOPBACK}:{port}/live",
            port=port,
            drain_seconds=drain_seconds,
            role=None,
        )

    return (
        process("gateway", "control", place.control_status_port, 0.0),
        process("envoy", "envoy", place.envoy_status_port, public.drain_seconds),
    )
