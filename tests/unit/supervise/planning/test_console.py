"""The web console of a serve, as a process of its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm import ports
from dynamo_vllm.cli.start import serve, serve_console
from dynamo_vllm.config import build, checks
from dynamo_vllm.config.options import ConsoleOptions, ConsoleSettings
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.supervise.planning import plan
from dynamo_vllm.supervise.planning.console import ConsolePlace
from dynamo_vllm.supervise.planning.gateway import GatewayPlace
from dynamo_vllm.supervise.planning.process import COMMAND, Plan, Process
from dynamo_vllm.supervise.run_folder import RunFolder

DISCOVERY = Path("/run/x/discovery")


WORKER = WorkerGroup(options={"engine": "fake"})


def planned(env: dict[str, str] | None = None, *, gateway: bool = False, **settings: Any) -> Plan:
    place = ConsolePlace(ConsoleSettings(**settings), 8001, DISCOVERY.parent)
    wanted = Topology(model="m", workers=(WORKER,), gateway={} if gateway else None)
    beside = GatewayPlace("/g", 9000, 9001, 9002) if gateway else None
    return plan.make(wanted, env or {}, DISCOVERY, gateway=beside, console=place)


def console_of(made: Plan) -> Process:
    (found,) = [process for process in made.processes if process.name == "console"]
    return found


def options_of(process: Process) -> ConsoleOptions:
    """What the process makes of its command and environment."""
    words = process.argv[len(COMMAND) + 1 :]
    options, rest = build.parse(ConsoleOptions, words, process.env, "console", "")
    assert rest == []
    checks.check_console(options)
    return options


def test_console_is_told_of_its_deployment_and_nothing_ends_with_it() -> None:
    hosts = ("a", "b")
    process = console_of(planned(console_read_only=True, console_hosts=hosts, console_grafana="http://g/"))
    options = options_of(process)
    assert (options.url, options.frontend) == ("http://127.0.0.1:8000", ("http://127.0.0.1:8000",))
    assert (options.console_port, options.serve_folder) == (8001, "/run/x")
    assert options.discovery_folder == DISCOVERY
    assert (process.is_essential, process.is_worker) == (False, False)
    assert process.url == "http://127.0.0.1:8001/" and process.health == "http://127.0.0.1:8001/live"
    assert options.console_read_only and options.console_hosts == hosts
    assert options.console_grafana == "http://g/"
    without = plan.make(Topology(model="m", workers=(WORKER,)), {}, DISCOVERY)
    assert "console" not in {process.name for process in without.processes}


def test_behind_a_gateway_it_reads_the_frontend_and_asks_through_the_gateway() -> None:
    made = planned({"VLLM_API_KEY": "secret-key", "DYN_VLLM_STATUS_FD": "3"}, gateway=True)
    process = console_of(made)
    options = options_of(process)
    assert (options.url, options.frontend) == (made.url, (made.frontend_url,))
    assert "secret-key" not in str(process) and "DYN_VLLM_STATUS_FD" not in process.env


def test_database_of_a_gateway_with_keys_goes_as_a_variable() -> None:
    frontend = {"port": 18000}
    url = "postgresql://u:secret@h/n"
    closed = Topology(frontend=frontend, gateway={"database": url})
    place = serve_console.place(ConsoleSettings(), closed, {}, RunFolder(Path("/r")))
    assert place.database == url
    opened = Topology(frontend=frontend, gateway={"database": url, "open": True})
    assert serve_console.place(ConsoleSettings(), opened, {}, RunFolder(Path("/r"))).database is None
    assert serve_console.place(ConsoleSettings(), Topology(), {}, RunFolder(Path("/r"))).database is None
    wanted = Topology(model="m", workers=(WORKER,))
    process = console_of(plan.make(wanted, {}, DISCOVERY, console=place))
    assert options_of(process).database == url and "secret" not in " ".join(process.argv)


def test_other_machines_need_the_token_of_the_workers_which_goes_as_a_variable() -> None:
    place = ConsolePlace(ConsoleSettings(console_host="0.0.0.0"), 8001, DISCOVERY.parent)
    group = WorkerGroup(options={"engine": "fake", "admin_token": "t0ken"})
    process = console_of(plan.make(Topology(model="m", workers=(group,)), {}, DISCOVERY, console=place))
    assert options_of(process).admin_token == "t0ken"
    assert "t0ken" not in " ".join(process.argv)
    assert process.health == "http://127.0.0.1:8001/live"
    with pytest.raises(ConfigError, match="give --admin-token"):
        planned(console_host="0.0.0.0")
    assert options_of(console_of(planned({"DYN_VLLM_ADMIN_TOKEN": "t"}, console_host="0.0.0.0"))).admin_token


def planned_with_ports(place: ConsolePlace, **worker: Any) -> Plan:
    group = WorkerGroup(options={"engine": "fake", **worker}, count=2)
    return plan.make(Topology(model="m", workers=(group,)), {}, DISCOVERY, console=place)


def test_port_that_was_given_to_a_worker_is_not_the_consoles() -> None:
    place = ConsolePlace(ConsoleSettings(), 8001, DISCOVERY.parent, spare_port=20001)
    made = planned_with_ports(place, system_port=8001)
    assert console_of(made).url == "http://127.0.0.1:20001/"
    assert options_of(console_of(made)).console_port == 20001
    assert made.named_ports == {8000, 8001, 8002, 20001}
    assert console_of(planned_with_ports(place)).port == 8001


def test_port_that_was_named_for_the_console_and_a_worker_is_refused() -> None:
    place = ConsolePlace(ConsoleSettings(console_port=8002), 8002, DISCOVERY.parent)
    with pytest.raises(ConfigError, match="--system-port 8001: 8002 for worker-2 is taken by --console-port"):
        planned_with_ports(place, system_port=8001)
    frontends = ConsolePlace(ConsoleSettings(console_port=8000), 8000, DISCOVERY.parent)
    with pytest.raises(ConfigError, match="--console-port 8000 is taken by --port; name another"):
        planned_with_ports(frontends)


def settings_of(*argv: str, **env: str) -> ConsoleSettings | None:
    options, _ = serve.understand(argv, env)
    return serve_console.settings(serve.given_flags(argv), options, env)


def test_serve_has_a_console_unless_told_not_to() -> None:
    assert settings_of("m") == ConsoleSettings()
    assert settings_of("m", "--no-console") is None
    assert settings_of("m", DYN_VLLM_CONSOLE="0") is None
    made = settings_of("m", "--console-port", "9", DYN_VLLM_CONSOLE_HOSTS="a,b")
    assert made == ConsoleSettings(console_port=9, console_hosts=("a", "b"))


def place_of(settings: ConsoleSettings, port: int) -> ConsolePlace:
    return serve_console.place(settings, Topology(frontend={"port": port}), {}, RunFolder(Path("/r")))


def test_port_is_the_next_one_or_a_free_one() -> None:
    with ports.reserve() as one:
        taken = ports.number(one)
        one.listen()
        with pytest.raises(StartError, match=f"--console-port {taken} on 127.0.0.1 cannot be used"):
            place_of(ConsoleSettings(console_port=taken), 8000)
        other = place_of(ConsoleSettings(), taken - 1).port
        assert other not in (taken, taken - 1)
    assert place_of(ConsoleSettings(console_port=0), 8000).port not in (0, 8001)
    usual = place_of(ConsoleSettings(), taken - 1)
    assert usual.port == taken and usual.spare_port not in (None, taken)
