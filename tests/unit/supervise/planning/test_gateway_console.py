"""The web console behind the gateway: what is refused, and how the processes find each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_vllm.cli.start import serve_console
from dynamo_vllm.config.options import ConsoleSettings
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.gateway.envoy import config
from dynamo_vllm.gateway.envoy.settings import EnvoySettings
from dynamo_vllm.supervise.planning import plan
from dynamo_vllm.supervise.planning.console import ConsolePlace
from dynamo_vllm.supervise.planning.gateway import GatewayPlace

WORKER = WorkerGroup(options={"model": "m", "engine": "fake"})
SOCKET = "/run/g/console"


def wanted(gateway: dict[str, object] | None) -> Topology:
    return Topology(workers=(WORKER,), gateway=gateway, frontend={"host": "0.0.0.0"})


@pytest.mark.parametrize(
    ("gateway", "console", "message"),
    [
        (None, ConsoleSettings(), "needs a gateway with keys: give --gateway, without --open"),
        ({"open": True}, ConsoleSettings(), "--gateway-console needs a gateway with keys"),
        ({}, None, "--gateway-console and --no-console contradict each other"),
    ],
)
def test_console_without_operators_is_refused(
    gateway: dict[str, object] | None, console: ConsoleSettings | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_console.refuse_behind_nothing(wanted(gateway), console)
    serve_console.refuse_behind_nothing(wanted({}), ConsoleSettings())


@pytest.mark.parametrize("socket", [SOCKET, None], ids=["with", "without"])
def test_envoy_and_the_console_get_the_same_socket(socket: str | None) -> None:
    console = ConsolePlace(
        ConsoleSettings(), 8001, Path("/run/x"), gateway_socket=socket, gateway_host="0.0.0.0"
    )
    place = GatewayPlace("/run/g", 1001, 1002, 1003, socket)
    made = plan.make(wanted({}), {}, Path("/run/x/discovery"), gateway=place, console=console)
    argv = {process.name: process.argv for process in made.processes}
    has = socket is not None
    assert (f"--console-socket={SOCKET}" in argv["envoy"]) == has
    assert (f"--gateway-socket={SOCKET}" in argv["console"]) == has
    assert "--gateway-host=0.0.0.0" in argv["console"]


def test_envoy_knows_no_console_unless_it_is_told() -> None:
    plain = EnvoySettings(
        host="0.0.0.0", port=1, frontends=("http://f:1",), control_socket="/c", admin_socket="/a"
    )
    assert "/console" not in str(config.document(plain))
