"""Plans the console of `dynamo-vllm serve`: whether there is one, where it listens, what it is told."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynamo_vllm import ports
from dynamo_vllm.cli.start import gateway
from dynamo_vllm.config import build
from dynamo_vllm.config.options import ConsoleSettings, FrontendOptions, GatewaySettings
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.serving.watch import request_trace
from dynamo_vllm.supervise.planning.console import ConsolePlace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import ServeOptions
    from dynamo_vllm.config.topology import Topology
    from dynamo_vllm.supervise.planning.gateway import GatewayPlace
    from dynamo_vllm.supervise.run_folder import RunFolder

BEHIND_GATEWAY = (
    "the console is also at {}/console/: log in with a key that has --admin (dynamo-vllm keys create NAME "
    "--admin), or with --admin-token"
)


def refuse_behind_nothing(wanted: Topology, console: ConsoleSettings | None) -> None:
    """A gateway without keys knows no operators; and what it serves to everybody has the console's origin."""
    if console is None:
        raise ConfigError("--gateway-console and --no-console contradict each other; leave one of them out")
    if wanted.gateway is None or wanted.gateway.get("open"):
        raise ConfigError(
            "--gateway-console needs a gateway with keys: give --gateway, without --open; or reach the "
            "console at its own address with --console-host and --admin-token"
        )


def settings(
    given: Mapping[str, object], options: ServeOptions, environment: Mapping[str, str]
) -> ConsoleSettings | None:
    """Return what was said of the console; None if there is to be none."""
    if not options.console:
        return None
    return build.from_values(ConsoleSettings, given, environment)


def place(
    console: ConsoleSettings,
    wanted: Topology,
    environment: Mapping[str, str],
    folder: RunFolder,
    behind: GatewayPlace | None = None,
) -> ConsolePlace:
    """Return where the console listens: on the port that the user named, or on the one after the
    deployment's, unless the plan gives that one to a worker.
    """
    host = console.console_host
    front = build.from_values(FrontendOptions, wanted.frontend, environment)
    after = front.port + 1
    spare = None
    if console.console_port:
        port = console.console_port
        ports.refuse_taken("--console-port", host, port)
    elif console.console_port is None and after <= 65535 and not ports.is_taken(host, after):
        ports.leave_out([after])
        port, spare = after, ports.reserve_for_life()
    else:
        port = ports.reserve_for_life()
    database = None
    if wanted.gateway is not None and not wanted.gateway.get("open"):
        given = build.from_values(GatewaySettings, wanted.gateway, environment)
        database = gateway.database_url(given, environment)
    trace_url = request_trace.new_url(ports.reserve_for_life())
    made = ConsolePlace(console, port, folder.path, trace_url, database, spare_port=spare)
    if behind is None or behind.console_socket is None:
        return made
    return dataclasses.replace(made, gateway_socket=behind.console_socket, gateway_host=front.host)
