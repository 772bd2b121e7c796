"""The suite every connector of the table passes: what it tells vLLM, what it needs, and what it lets through.

A line in CONNECTORS is enough to run it. tests/contract/test_connectors.py asks vLLM about the same table.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.config.options.kv_cache import DiskSpace
from dynamo_vllm.config.rules import connectors as connector_rules
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.kv.connectors import CONNECTORS, choose
from dynamo_vllm.kv.connectors.base import Connector, ConnectorPlace, Rejected, handover
from dynamo_vllm.kv.connectors.multi import AsWritten, Multi

HANDED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[3, 4]],
    "remote_num_tokens": 60,
    "tp_size": 1,
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
@pytest.mark.parametrize("role", ["agg", "prefill", "decode"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tells_vllm_its_name_and_role(connector: Connector, role: str, device: str) -> None:
    config = connector.engine_config(ConnectorPlace(role=role, device=device))
    assert config["kv_connector"]
    assert config["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")


@by_name
def test_hands_over_what_it_asked_for(connector: Connector) -> None:
    """Either a job carries parameters on both sides, or on neither."""
    carries = connector.prefill_params() is not None
    assert (connector.decode_params(handed(), 64, 32) is not None) is carries


@by_name
def test_what_the_user_set_stands(connector: Connector) -> None:
    wanted = connector.needs(gpu()).environment
    theirs = dict.fromkeys(wanted, "7")
    assert connector.needs(gpu(environment=theirs)).environment == {}


@by_name
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pair_can_work_or_is_refused_with_the_way_out(connector: Connector, role: str) -> None:
    if connector.prefill_params() is not None:
        connector.needs(gpu(role))
    else:
        with pytest.raises(ConfigError, match=f"--connector {connector.name} nixl"):
            connector.needs(gpu(role))


@pytest.mark.parametrize(
    "wrong",
    [
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
        handed(remote_host=None),
        handed(remote_host=""),
        handed(remote_port=0),
        handed(remote_port="5600"),
        handed(remote_port=70000),
        handed(remote_block_ids=[]),
        handed(remote_block_ids=[[]]),
        handed(remote_block_ids=[[-1]]),
        handed(remote_block_ids=[["a"]]),
        handed(remote_block_ids=[[3]]),
        handed(remote_block_ids=[[3, 4, 5]]),
        handed(tp_size=0),
    ],
    ids=lambda wrong: re.sub(r"[0-9]{9}[0-9.]*", "a time", str(wrong)),
)
@pytest.mark.parametrize("connector", HANDS_OVER, ids=lambda c: c.name)
def test_nothing_that_would_kill_or_hang_an_engine_passes(connector: Connector, wrong: object) -> None:
    with pytest.raises(Rejected):
        connector.decode_params(wrong, 64, 32)


# --- NIXL -----------------------------------------------------------------------------------------------


def test_a_missing_field_is_refused_whichever_it_is() -> None:
    for name in (
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "tp_size",
    ):
        params = {key: value for key, value in HANDED.items() if key != name}
        with pytest.raises(Rejected, match=name):
            CONNECTORS["nixl"].decode_params(handover(params, 30), 64, 32)


def test_lost_caches_are_computed_anew_and_leases_are_set() -> None:
    config = CONNECTORS["nixl"].engine_config(ConnectorPlace(role="prefill", device="cpu", lease_seconds=7))
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 7}
    assert (config["kv_role"], config["kv_buffer_device"]) == ("kv_producer", "cpu")


# --- LMCache --------------------------------------------------------------------------------------------


def test_lmcache_hashes_alike_in_every_process_and_is_sized_and_silent() -> None:
    needs = CONNECTORS["lmcache"].needs(gpu(offload_gb=2.5))
    assert needs.environment == {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2.5",
    }
    assert needs.shares_metrics


def test_lmcache_file_stands_but_for_what_it_leaves_open(tmp_path: Path) -> None:
    """Variables stand above the file inside LMCache: one that the file says too would overrule it."""
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 40\nchunk_size: 64\n")
    found = CONNECTORS["lmcache"].needs(gpu(environment={"LMCACHE_CONFIG_FILE": str(file)})).environment
    assert "LMCACHE_MAX_LOCAL_CPU_SIZE" not in found
    assert found["LMCACHE_PRE_CACHING_HASH_ALGORITHM"] == "sha256_cbor"
    file.write_text("pre_caching_hash_algorithm: sha256\n")
    found = CONNECTORS["lmcache"].needs(gpu(environment={"LMCACHE_CONFIG_FILE": str(file)})).environment
    assert "LMCACHE_PRE_CACHING_HASH_ALGORITHM" not in found


@pytest.mark.parametrize("text", [None, "a: [b"])
def test_lmcache_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "lmcache.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"LMCACHE_CONFIG_FILE={file}"):
        CONNECTORS["lmcache"].needs(gpu(environment={"LMCACHE_CONFIG_FILE": str(file)}))


@pytest.mark.parametrize("in_file", [True, False])
def test_lmcache_with_a_store_both_reach_serves_a_pair_alone(tmp_path: Path, in_file: bool) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("remote_url: fs://host/shared\n")
    environment = (
        {"LMCACHE_CONFIG_FILE": str(file)} if in_file else {"LMCACHE_REMOTE_URL": "fs://host/shared"}
    )
    CONNECTORS["lmcache"].needs(gpu("prefill", environment))


@pytest.mark.parametrize("name", ["lmcache", "kvbm"])
def test_offloaders_are_refused_on_cpu(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the connector {name}.*CPU"):
        CONNECTORS[name].needs(ConnectorPlace(role="agg", device="cpu"))


# --- KVBM -----------------------------------------------------------------------------------------------


def test_kvbm_gets_a_tier_and_ports_of_its_own() -> None:
    needs = CONNECTORS["kvbm"].needs(gpu(offload_gb=8))
    assert needs.environment == {
        "DYN_KVBM_CPU_CACHE_GB": "8",
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT": "41000",
        "DYN_KVBM_LEADER_ZMQ_ACK_PORT": "41001",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }
    assert needs.merged_events == "tcp://127.0.0.1:41003"
    assert needs.metrics_url is None


def test_kvbm_gets_no_port_twice() -> None:
    found = iter([5, 5, 5, 6, 6, 7, 8])
    place = ConnectorPlace(role="agg", device="cuda", find_port=lambda: next(found))
    assert CONNECTORS["kvbm"].needs(place).merged_events == "tcp://127.0.0.1:8"


@pytest.mark.parametrize(
    "name", ["DYN_KVBM_CPU_CACHE_GB", "DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"]
)
def test_kvbm_tiers_are_the_users_where_he_sizes_one(name: str) -> None:
    found = CONNECTORS["kvbm"].needs(gpu(environment={name: "12"})).environment
    assert not [key for key in found if "CACHE" in key and key.startswith("DYN_")]


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_kvbm_size_that_would_end_the_engine_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=f"DYN_KVBM_CPU_CACHE_GB='{size}' is not a size"):
        CONNECTORS["kvbm"].needs(gpu(environment={"DYN_KVBM_CPU_CACHE_GB": size}))


def test_kvbm_events_are_heard_behind_the_port_the_user_fixed() -> None:
    def merged(**environment: str) -> str | None:
        return CONNECTORS["kvbm"].needs(gpu(environment=environment)).merged_events

    assert merged(DYN_KVBM_LEADER_ZMQ_PUB_PORT="56001") == "tcp://127.0.0.1:57001"
    assert merged(DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR="false") is None
    for wrong in ("0", "64536", "port"):
        with pytest.raises(ConfigError, match="is not a port"):
            merged(DYN_KVBM_LEADER_ZMQ_PUB_PORT=wrong)


def test_kvbm_metrics_are_collected_where_they_are_switched_on() -> None:
    needs = CONNECTORS["kvbm"].needs(gpu(environment={"DYN_KVBM_METRICS": "true"}))
    assert needs.environment["DYN_KVBM_METRICS_PORT"] == "41002"
    assert needs.metrics_url == "http://127.0.0.1:41002/metrics"
    fixed = {"DYN_KVBM_METRICS": "1", "DYN_KVBM_METRICS_PORT": "6880"}
    assert CONNECTORS["kvbm"].needs(gpu(environment=fixed)).metrics_url == "http://127.0.0.1:6880/metrics"


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


def test_tiers_work_on_cpu_too() -> None:
    assert CONNECTORS["offload"].needs(ConnectorPlace(role="agg", device="cpu")).environment == {}


# --- several at once ------------------------------------------------------------------------------------


def composed(*names: str) -> Connector:
    found = choose(names)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("names", "class_name", "parts"),
    [
        (("kvbm", "nixl"), "PdConnector", ["DynamoConnector", "NixlConnector"]),
        (("nixl", "kvbm"), "PdConnector", ["DynamoConnector", "NixlConnector"]),
        (("lmcache", "nixl"), "MultiConnector", ["LMCacheConnectorV1", "NixlConnector"]),
        (("nixl", "lmcache"), "MultiConnector", ["LMCacheConnectorV1", "NixlConnector"]),
    ],
)
@pytest.mark.parametrize("role", ["agg", "prefill"])
def test_what_keeps_caches_comes_before_what_moves_them(
    names: tuple[str, ...], class_name: str, parts: list[str], role: str
) -> None:
    config = composed(*names).engine_config(gpu(role))
    assert config["kv_connector"] == class_name
    assert [part["kv_connector"] for part in config["kv_connector_extra_config"]["connectors"]] == parts


@pytest.mark.parametrize("names", [("kvbm", "nixl"), ("lmcache", "nixl")])
def test_decode_worker_of_a_pair_only_fetches(names: tuple[str, ...]) -> None:
    place = gpu("decode")
    assert composed(*names).engine_config(place) == CONNECTORS["nixl"].engine_config(place)
    assert composed(*names).needs(place) == CONNECTORS["nixl"].needs(place)


@pytest.mark.parametrize("names", [("offload", "nixl"), ("nixl", "offload")])
@pytest.mark.parametrize("role", ["agg", "prefill", "decode"])
def test_tiers_come_after_nixl_which_has_the_whole_prompt(names: tuple[str, ...], role: str) -> None:
    config = composed(*names).engine_config(gpu(role))
    parts = [part["kv_connector"] for part in config["kv_connector_extra_config"]["connectors"]]
    assert (config["kv_connector"], parts) == ("MultiConnector", ["NixlConnector", "TierConnector"])
    assert config["kv_load_failure_policy"] == "recompute"
    composed(*names).needs(gpu(role))


def test_handed_over_cache_waits_for_no_disk() -> None:
    """vLLM asks the tiers too, and waits for their answer before it lets NIXL load."""
    found = composed("offload", "nixl").decode_params(handed(), 64, 32)
    assert found == {**HANDED, "kv_load_tiers": [{"medium": "CPU"}]}


def test_prefill_worker_of_a_pair_has_the_needs_of_all() -> None:
    needs = composed("kvbm", "nixl").needs(gpu("prefill"))
    assert "DYN_KVBM_CPU_CACHE_GB" in needs.environment
    assert needs.merged_events
    assert composed("lmcache", "nixl").needs(gpu("prefill")).shares_metrics


@pytest.mark.parametrize("names", [[], ["none"], ["null"]])
def test_none_is_none(names: list[str]) -> None:
    assert choose(names) is None


def test_what_the_user_wrote_stands_and_nixl_in_it_is_checked() -> None:
    written = choose([], '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
    inside = choose(
        [],
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config":'
        ' {"connectors": [{"kv_connector": "NixlConnector"}]}}',
    )
    for connector in (written, inside):
        assert isinstance(connector, AsWritten)
        assert connector.engine_config(gpu()) == {}
        assert connector.decode_params(handed(), 64, 32) == HANDED
        with pytest.raises(Rejected):
            connector.decode_params(handover({"do_remote_prefill": True}, 30), 64, 32)
    other = choose([], '{"kv_connector": "ExampleConnector"}')
    assert other is not None and other.decode_params(handover({"a": 1}, 30), 64, 32) == {"a": 1}


def test_what_the_user_wrote_gets_what_its_connectors_need() -> None:
    written = choose([], '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}')
    assert written is not None
    assert written.needs(gpu("prefill")).shares_metrics
    other = choose([], '{"kv_connector": "ExampleConnector"}')
    assert other is not None and other.needs(gpu()).environment == {}
