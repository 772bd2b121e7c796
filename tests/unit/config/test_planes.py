"""Which servers the options ask for, where they are, and what `serve` makes of them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dynamo_vllm.config import planes, runtime_env
from dynamo_vllm.config.options import FrontendOptions, WorkerOptions
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.supervise.planning.plan import make
from dynamo_vllm.supervise.planning.process import Plan

ETCD = {"discovery_backend": "etcd", "etcd_endpoints": "http://10.0.0.1:2379"}


def test_only_what_is_used_is_needed() -> None:
    for options, needed in (
        (FrontendOptions(), []),
        (FrontendOptions(etcd_endpoints="http://e:1", nats_server="nats://n:1"), []),
        (FrontendOptions(discovery_backend="etcd"), [("etcd", "--discovery-backend etcd")]),
        (FrontendOptions(request_plane="nats"), [("NATS", "--request-plane nats")]),
        (FrontendOptions(event_plane="nats"), [("NATS", "--event-plane nats")]),
        (
            FrontendOptions(request_plane="nats", event_plane="nats"),
            [("NATS", "--request-plane nats and --event-plane nats")],
        ),
    ):
        found = planes.servers(options, options.event_plane)
        assert [(server.name, server.why) for server in found] == needed


def test_the_runtime_is_told_where_the_servers_are() -> None:
    options = WorkerOptions(
        discovery_backend="etcd", etcd_endpoints="http://e:1", event_plane="nats", nats_server="nats://n:1"
    )
    found = runtime_env.variables(options)
    assert (found["ETCD_ENDPOINTS"], found["NATS_SERVER"]) == ("http://e:1", "nats://n:1")
    assert "ETCD_LEASE_TTL" not in found
    assert runtime_env.variables(WorkerOptions(etcd_lease_seconds=30))["ETCD_LEASE_TTL"] == "30"


def test_one_address_that_answers_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as gone:
        urls = [f"http://127.0.0.1:{s.getsockname()[1]}" for s in (gone, listening)]
        gone.close()
        options = FrontendOptions(discovery_backend="etcd", etcd_endpoints=",".join(urls))
        planes.refuse_unreachable(planes.servers(options), 0)


def test_server_away_is_named_with_the_fix_and_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    options = FrontendOptions(request_plane="nats", nats_server=f"nats://me:secret@127.0.0.1:{port}")
    with pytest.raises(StartError) as refused:
        planes.refuse_unreachable(planes.servers(options), 0)
    assert str(refused.value) == (
        f"NATS does not answer at 127.0.0.1:{port} (Connection refused); --request-plane nats needs it. "
        "Start it, or give its address with --nats-server"
    )


def test_etcd_is_told_who_asks_from_the_runtimes_variables() -> None:
    env = {
        "ETCD_AUTH_USERNAME": "u",
        "ETCD_AUTH_PASSWORD": "p",
        "ETCD_AUTH_CA": "/ca",
        "ETCD_AUTH_CLIENT_KEY": "",
    }
    options = FrontendOptions(discovery_backend="etcd", etcd_endpoints="https://a:1, https://b:1")
    assert planes.etcd_access(options, env) == planes.EtcdAccess(
        ("https://a:1", "https://b:1"), "u", "p", "/ca", None, None
    )
    assert planes.etcd_access(FrontendOptions(), env) is None


# --- serve --------------------------------------------------------------------------------------------------


def served(frontend: dict[str, str], worker: dict[str, str], env: dict[str, str] | None = None) -> Plan:
    group = WorkerGroup(options={"engine": "fake", **worker})
    return make(Topology("m", frontend, (group,)), {"PATH": "/bin", **(env or {})}, Path("/run/discovery"))


def test_every_process_gets_the_way_to_the_others() -> None:
    plan = served({**ETCD, "request_plane": "nats"}, {**ETCD, "request_plane": "nats"})
    for process in plan.processes:
        assert process.env["DYN_DISCOVERY_BACKEND"] == "etcd"
        assert process.env["ETCD_ENDPOINTS"] == "http://10.0.0.1:2379"
        assert process.env["DYN_REQUEST_PLANE"] == "nats"
    with pytest.raises(ConfigError, match="a worker has --request-plane nats and the frontend tcp"):
        served({}, {"request_plane": "nats"})


@pytest.mark.parametrize(
    ("options", "env", "host"),
    [
        ({}, {}, "127.0.0.1"),
        ({"request_plane": "nats", "nats_server": "nats://10.0.0.1:4222"}, {}, "127.0.0.1"),
        ({**ETCD, "etcd_endpoints": "http://localhost:2379"}, {}, "127.0.0.1"),
        (ETCD, {}, None),
        (ETCD, {"DYN_VLLM_BIND_HOST": "10.0.0.7"}, "10.0.0.7"),
        ({"discovery_backend": "kubernetes"}, {}, None),
    ],
)
def test_others_are_given_an_address_they_can_reach(
    options: dict[str, str], env: dict[str, str], host: str | None
) -> None:
    plan = served(options, options, env)
    assert [process.env.get("DYN_VLLM_BIND_HOST") for process in plan.processes] == [host, host]
