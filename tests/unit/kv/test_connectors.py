"""The suite every connector of the table passes: what it tells vLLM, what it needs, and what it lets through.

A line in CONNECTORS is enough to run it. tests/contract/test_connectors.py asks vLLM about the same table.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.config.options.kv_cache import DiskSpace
from dynamo_vllm.config.rules import connectors as connector_rules
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.kv.connectors import CONNECTORS, choose
from dynamo_vllm.kv.connectors.base import Connector, ConnectorPlace, Needs, Rejected, handover
from dynamo_vllm.kv.connectors.multi import AsWritten, Multi

REMOTE = {"engine_id": "e", "request_id": "r", "host": "127.0.0.1", "port": 5600, "block_ids": [[3, 4]]}
HANDED = {
    **{f"remote_{name}": value for name, value in REMOTE.items()},
    **{"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": 60, "tp_size": 1},
}
# Every connector alone, and every one that does not hand over itself together with NIXL.
EVERY: list[Connector] = [
    *CONNECTORS.values(),
    *(Multi([c, CONNECTORS["nixl"]]) for c in CONNECTORS.values() if c.prefill_params() is None),
]
PACKAGED = [c for c in CONNECTORS.values() if c.name != "offload"]
"""Connectors that do not come with vLLM."""
HANDS_OVER = [c for c in EVERY if c.prefill_params() is not None]
by_name = pytest.mark.parametrize("connector", EVERY, ids=lambda c: c.name)


def handed(**changes: Any) -> dict[str, Any]:
    return handover({**HANDED, **changes}, 30)


def gpu(role: str = "agg", environment: Mapping[str, str] | None = None, **more: Any) -> ConnectorPlace:
    ports: Iterator[int] = itertools.count(41000)
    return ConnectorPlace(
        role=role, device="cuda", environment=environment or {}, find_port=lambda: next(ports), **more
    )


# --- every connector ------------------------------------------------------------------------------------


def test_names_are_keys_and_unique() -> None:
    assert {name: c.name for name, c in CONNECTORS.items()} == {name: name for name in CONNECTORS}
    assert len({c.name for c in EVERY}) == len(EVERY)


def test_command_line_knows_every_connector_and_its_package() -> None:
    assert {*CONNECTORS, "none", "null"} == set(connector_rules.CONNECTORS)
    classes = {c.engine_config(gpu())["kv_connector"]: c.name for c in PACKAGED}
    assert classes == connector_rules.PACKAGES


def test_package_is_an_extra_of_ours() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for connector in PACKAGED:
        assert f"\n{connector.name} = [" in project


@by_name
def test_tells_vllm_its_name_and_role(connector: Connector) -> None:
    for role, device in itertools.product(("agg", "prefill", "decode"), ("cpu", "cuda")):
        config = connector.engine_config(ConnectorPlace(role=role, device=device))
        assert config["kv_connector"]
        assert config["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")


@by_name
def test_what_the_user_set_stands(connector: Connector) -> None:
    theirs = dict.fromkeys(connector.needs(gpu()).environment, "7")
    assert connector.needs(gpu(environment=theirs)).environment == {}


@by_name
def test_hands_over_what_it_asked_for_or_is_refused_in_a_pair_with_the_way_out(connector: Connector) -> None:
    """Either a job carries parameters on both sides, or on neither."""
    carries = connector.prefill_params() is not None
    assert (connector.decode_params(handed(), 64, 32) is not None) is carries
    for role in ("prefill", "decode"):
        if carries:
            connector.needs(gpu(role))
        else:
            with pytest.raises(ConfigError, match=f"--connector {connector.name} nixl"):
                connector.needs(gpu(role))


WRONG: list[object] = [
    None,
    "text",
    {},
    handover(None, 30),
    handover(HANDED, 0),
    {"kv_transfer_params": HANDED},
    {"kv_transfer_params": HANDED, "expires_at": "soon"},
    {"kv_transfer_params": "x", "expires_at": 1e12},
    handover({"do_remote_prefill": True}, 30),
    handed(do_remote_prefill=False),
    handed(remote_engine_id=""),
    handed(remote_request_id=None),
    *(handed(remote_host=host) for host in (None, "")),
    *(handed(remote_port=port) for port in (0, "5600", 70000)),
    *(handed(remote_block_ids=[ids]) for ids in ([], [-1], ["a"], [3], [3, 4, 5])),
    handed(remote_block_ids=[]),
    handed(tp_size=0),
]


@pytest.mark.parametrize("connector", HANDS_OVER, ids=lambda c: c.name)
def test_nothing_that_would_kill_or_hang_an_engine_passes(connector: Connector) -> None:
    for wrong in WRONG:
        try:
            passed = connector.decode_params(wrong, 64, 32)
        except Rejected:
            continue
        pytest.fail(f"{wrong} became {passed}")


# --- NIXL -----------------------------------------------------------------------------------------------


def test_a_missing_field_is_refused_whichever_it_is() -> None:
    for name in (*(f"remote_{name}" for name in REMOTE), "tp_size"):
        params = {key: value for key, value in HANDED.items() if key != name}
        with pytest.raises(Rejected, match=name):
            CONNECTORS["nixl"].decode_params(handover(params, 30), 64, 32)


def test_lost_caches_are_computed_anew_and_leases_are_set() -> None:
    config = CONNECTORS["nixl"].engine_config(ConnectorPlace(role="prefill", device="cpu", lease_seconds=7))
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 7}
    assert (config["kv_role"], config["kv_buffer_device"]) == ("kv_producer", "cpu")


# --- LMCache --------------------------------------------------------------------------------------------


def needs(name: str, **environment: str) -> Needs:
    return CONNECTORS[name].needs(gpu(environment=environment))


def test_lmcache_hashes_alike_in_every_process_and_is_sized_and_silent() -> None:
    needed = CONNECTORS["lmcache"].needs(gpu(offload_gb=2.5))
    assert needed.environment == {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2.5",
    }
    assert needed.shares_metrics


def test_lmcache_file_stands_but_for_what_it_leaves_open(tmp_path: Path) -> None:
    """Variables stand above the file inside LMCache: one that the file says too would overrule it."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 40\nchunk_size: 64\n")
    environment = needs("lmcache", LMCACHE_CONFIG_FILE=str(file)).environment
    assert "LMCACHE_MAX_LOCAL_CPU_SIZE" not in environment
    assert environment["LMCACHE_PRE_CACHING_HASH_ALGORITHM"] == "sha256_cbor"
    file.write_text("pre_caching_hash_algorithm: sha256\n")
    environment = needs("lmcache", LMCACHE_CONFIG_FILE=str(file)).environment
    assert "LMCACHE_PRE_CACHING_HASH_ALGORITHM" not in environment
    for unreadable in ("a: [b", None):
        file.unlink() if unreadable is None else file.write_text(unreadable)
        with pytest.raises(ConfigError, match=f"LMCACHE_CONFIG_FILE={file}"):
            needs("lmcache", LMCACHE_CONFIG_FILE=str(file))


def test_lmcache_with_a_store_both_reach_serves_a_pair_alone(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("remote_url: fs://host/shared\n")
    for environment in ({"LMCACHE_CONFIG_FILE": str(file)}, {"LMCACHE_REMOTE_URL": "fs://host/shared"}):
        CONNECTORS["lmcache"].needs(gpu("prefill", environment))


def test_offloaders_but_tiers_are_refused_on_cpu() -> None:
    place = ConnectorPlace(role="agg", device="cpu")
    for name in ("lmcache", "kvbm"):
        with pytest.raises(ConfigError, match=f"the connector {name}.*CPU"):
            CONNECTORS[name].needs(place)
    assert CONNECTORS["offload"].needs(place).environment == {}


# --- KVBM -----------------------------------------------------------------------------------------------


def test_kvbm_gets_a_tier_and_ports_of_its_own() -> None:
    needed = CONNECTORS["kvbm"].needs(gpu(offload_gb=8))
    assert needed.environment == {
        "DYN_KVBM_CPU_CACHE_GB": "8",
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT": "41000",
        "DYN_KVBM_LEADER_ZMQ_ACK_PORT": "41001",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    assert needed.merged_events == "tcp://127.0.0.1:41003"
    assert needed.metrics_url is None
    ports = iter([5, 5, 5, 6, 6, 7, 8])
    place = ConnectorPlace(role="agg", device="cuda", find_port=lambda: next(ports))
    assert CONNECTORS["kvbm"].needs(place).merged_events == "tcp://127.0.0.1:8", "no port twice"


def test_kvbm_tiers_are_the_users_where_he_sizes_one() -> None:
    for size in ("CPU_CACHE_GB", "DISK_CACHE_GB", "CPU_CACHE_OVERRIDE_NUM_BLOCKS"):
        environment = needs("kvbm", **{f"DYN_KVBM_{size}": "12"}).environment
        assert not [key for key in environment if "CACHE" in key and key.startswith("DYN_")]
    for wrong in ("0", "-1", "many"):
        with pytest.raises(ConfigError, match=f"DYN_KVBM_CPU_CACHE_GB='{wrong}' is not a size"):
            needs("kvbm", DYN_KVBM_CPU_CACHE_GB=wrong)


def test_kvbm_events_are_heard_behind_the_port_the_user_fixed() -> None:
    assert needs("kvbm", DYN_KVBM_LEADER_ZMQ_PUB_PORT="56001").merged_events == "tcp://127.0.0.1:57001"
    assert needs("kvbm", DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR="false").merged_events is None
    for wrong in ("0", "64536", "port"):
        with pytest.raises(ConfigError, match="is not a port"):
            needs("kvbm", DYN_KVBM_LEADER_ZMQ_PUB_PORT=wrong)


def test_kvbm_metrics_are_collected_where_they_are_switched_on() -> None:
    needed = needs("kvbm", DYN_KVBM_METRICS="true")
    assert needed.environment["DYN_KVBM_METRICS_PORT"] == "41002"
    assert needed.metrics_url == "http://127.0.0.1:41002/metrics"
    fixed = needs("kvbm", DYN_KVBM_METRICS="1", DYN_KVBM_METRICS_PORT="6880")
    assert fixed.metrics_url == "http://127.0.0.1:6880/metrics"


# --- tiers ----------------------------------------------------------------------------------------------


def extra(place: ConnectorPlace) -> dict[str, Any]:
    found: dict[str, Any] = CONNECTORS["offload"].engine_config(place)["kv_connector_extra_config"]
    return found


def test_tiers_are_shared_out_over_the_ranks_of_a_worker() -> None:
    place = gpu(offload_gb=8, ranks=4, disk=DiskSpace("/mnt/kv", 100), identity="abc")
    assert extra(place) == {
        "spec_name": "Tiers",
        "spec_module_path": "dynamo_vllm.engine.tiers.spec",
        "cpu_bytes_to_use": 2_000_000_000,
        "self_describing_kv_events": True,
        "packs_blocks": True,
        "secondary_tiers": [
            {
                "type": "DiskTier",
                "module_path": "dynamo_vllm.engine.tiers.disk_tier",
                "folder": "/mnt/kv",
                "limit_bytes": 25_000_000_000,
                "identity": "abc",
            }
        ],
    }


def test_tier_without_a_disk_is_host_memory_alone() -> None:
    assert "secondary_tiers" not in extra(gpu())
    assert extra(gpu())["cpu_bytes_to_use"] == 5_000_000_000


def test_folder_of_a_tier_is_the_same_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (disk,) = extra(gpu(disk=DiskSpace("~/kv", 1)))["secondary_tiers"]
    assert disk["folder"] == "/home/me/kv"
    (disk,) = extra(gpu(disk=DiskSpace("kv", 1)))["secondary_tiers"]
    assert Path(disk["folder"]) == Path.cwd() / "kv"


# --- several at once ------------------------------------------------------------------------------------


def composed(*names: str) -> Connector:
    found = choose(names)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("names", "class_name", "parts"),
    [
        (("kvbm", "nixl"), "PdConnector", ["DynamoConnector", "NixlConnector"]),
        (("lmcache", "nixl"), "MultiConnector", ["LMCacheConnectorV1", "NixlConnector"]),
        (("offload", "nixl"), "MultiConnector", ["NixlConnector", "TierConnector"]),
    ],
)
def test_what_keeps_caches_comes_before_what_moves_them_and_tiers_after_it(
    names: tuple[str, ...], class_name: str, parts: list[str]
) -> None:
    """A decode worker of a pair only fetches, but not one with tiers: there NIXL has the whole prompt."""
    has_tiers = "offload" in names
    for written in (names, names[::-1]):
        for role in ("agg", "prefill", "decode") if has_tiers else ("agg", "prefill"):
            config = composed(*written).engine_config(gpu(role))
            several = [part["kv_connector"] for part in config["kv_connector_extra_config"]["connectors"]]
            assert (config["kv_connector"], several) == (class_name, parts)
            assert not has_tiers or config["kv_load_failure_policy"] == "recompute"
            composed(*written).needs(gpu(role))
    if not has_tiers:
        place = gpu("decode")
        assert composed(*names).engine_config(place) == CONNECTORS["nixl"].engine_config(place)
        assert composed(*names).needs(place) == CONNECTORS["nixl"].needs(place)


def test_handed_over_cache_waits_for_no_disk() -> None:
    """vLLM asks the tiers too, and waits for their answer before it lets NIXL load."""
    found = composed("offload", "nixl").decode_params(handed(), 64, 32)
    assert found == {**HANDED, "kv_load_tiers": [{"medium": "CPU"}]}


def test_prefill_worker_of_a_pair_has_the_needs_of_all() -> None:
    needed = composed("kvbm", "nixl").needs(gpu("prefill"))
    assert "DYN_KVBM_CPU_CACHE_GB" in needed.environment
    assert needed.merged_events
    assert composed("lmcache", "nixl").needs(gpu("prefill")).shares_metrics


def test_none_is_none() -> None:
    assert [choose(names) for names in ([], ["none"], ["null"])] == [None] * 3


def written(name: str, **extra: Any) -> Connector:
    connector = choose([], json.dumps({"kv_connector": name, "kv_role": "kv_both", **extra}))
    assert isinstance(connector, AsWritten)
    return connector


def test_what_the_user_wrote_stands_and_nixl_in_it_is_checked() -> None:
    inside = {"connectors": [{"kv_connector": "NixlConnector"}]}
    for connector in (
        written("NixlConnector"),
        written("MultiConnector", kv_connector_extra_config=inside),
    ):
        assert connector.engine_config(gpu()) == {}
        assert connector.decode_params(handed(), 64, 32) == HANDED
        with pytest.raises(Rejected):
            connector.decode_params(handover({"do_remote_prefill": True}, 30), 64, 32)
    assert written("ExampleConnector").decode_params(handover({"a": 1}, 30), 64, 32) == {"a": 1}


def test_what_the_user_wrote_gets_what_its_connectors_need() -> None:
    assert written("LMCacheConnectorV1").needs(gpu("prefill")).shares_metrics
    assert written("ExampleConnector").needs(gpu()).environment == {}
