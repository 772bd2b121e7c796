"""Tests how vLLM handles every connector of the table, alone and combined with NIXL."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from dynamo_vllm.config import worker_plan
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.patches import plugin
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.tiers import connector as tier_connector
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.engine.vllm import kv_compatibility, kv_events
from dynamo_vllm.engine.vllm.names import Config
from dynamo_vllm.kv.compatibility import differences
from dynamo_vllm.kv.connectors import CONNECTORS
from dynamo_vllm.kv.connectors.base import Connector, ConnectorPlace
from dynamo_vllm.kv.connectors.multi import Multi
from dynamo_vllm.models.tiny import make_tiny_model
from dynamo_vllm.serving import factories

EVERY: list[Connector] = [
    *CONNECTORS.values(),
    *(Multi([c, CONNECTORS["nixl"]]) for c in CONNECTORS.values() if c.prefill_params() is None),
]
MERGED = "tcp://127.0.0.1:57001"
by_name = pytest.mark.parametrize("connector", EVERY, ids=lambda c: c.name)
by_role = pytest.mark.parametrize("role", ["agg", "prefill", "decode"])


def arguments(found: vllm_arguments.Resolved) -> Any:
    """Returns all of vLLM's arguments; our own types declare only those that we use."""
    return found.args


def packages(connector: Connector) -> set[str]:
    """Returns those that it needs; tiers come with vLLM."""
    return set(connector.name.split("+")) - {"offload"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("m") / "tiny"))


@pytest.fixture(scope="module", autouse=True)
def names() -> None:
    """vLLM knows our connector by name, as in each of its processes."""
    plugin.register_tiers()
    plugin.register_tiers()  # some processes load plugins twice


def test_beside_nixl_vllm_finds_the_statistics_of_tiers() -> None:
    both = Multi([CONNECTORS["offload"], CONNECTORS["nixl"]])
    parts = both.engine_config(ConnectorPlace(role="agg", device="cuda"))["kv_connector_extra_config"]
    for part in parts["connectors"]:
        found = KVConnectorFactory.get_connector_class(KVTransferConfig(**part))
        assert KVConnectorFactory.get_connector_class_by_name(found.__name__) is found


@by_name
@by_role
def test_configuration_is_accepted_and_its_class_is_vllms_or_comes_with_the_package(
    connector: Connector, role: str
) -> None:
    given = connector.engine_config(ConnectorPlace(role=role, device="cuda"))
    assert KVTransferConfig(**given).is_kv_transfer_instance
    parts = given.get("kv_connector_extra_config", {}).get("connectors", [])
    for part in parts:
        KVTransferConfig(**part)
    for config in (given, *parts):
        module = config.get("kv_connector_module_path")
        if module is None:
            assert config["kv_connector"] in KVConnectorFactory._registry
        else:
            assert module.split(".")[0] in packages(connector)


@by_name
def test_class_can_be_made(connector: Connector) -> None:
    """Checks that vLLM finds the class in the installed package, with every method that vLLM calls."""
    for package in packages(connector):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    config = KVTransferConfig(**connector.engine_config(ConnectorPlace(role="prefill", device="cuda")))
    found = KVConnectorFactory.get_connector_class(config)
    assert issubclass(found, KVConnectorBase_V1)
    assert not found.__abstractmethods__


@by_name
def test_engine_arguments_carry_it(connector: Connector, model: str) -> None:
    given = connector.engine_config(ConnectorPlace(role="prefill", device="cuda"))
    found = vllm_arguments.resolve(
        EngineSettings(model=model, kv_transfer=given, has_plain_blocks=connector.has_plain_blocks)
    )
    assert arguments(found).kv_transfer_config.kv_connector == given["kv_connector"]
    fired = {rule.argument for rule in found.fired}
    assert ("disable_hybrid_kv_cache_manager" in fired) is (not packages(connector) <= {"nixl"})


def test_prefill_and_decode_compare_their_vllm_before_its_handshake_would(model: str) -> None:
    """NIXL's handshake has another number in every release; workers that tell these terms never try it."""
    given = CONNECTORS["nixl"].engine_config(ConnectorPlace(role="prefill", device="cpu"))
    settings = EngineSettings(model=model, kv_transfer=given)
    here = kv_compatibility.terms(created(settings))
    assert here["vllm"] == vllm.__version__
    (found,) = differences(here, {**here, "vllm": "0.29.0"})
    assert found == f"vllm is {vllm.__version__} here and 0.29.0 there"


def test_tiers_of_one_side_make_no_difference_to_a_latent_cache(model: str) -> None:
    """It has one head; with several, both sides want the same order of heads and tokens."""
    place = ConnectorPlace(role="prefill", device="cpu")
    layouts = set()
    for connector in (CONNECTORS["nixl"], Multi([CONNECTORS["offload"], CONNECTORS["nixl"]])):
        config = created(EngineSettings(model=model, kv_transfer=connector.engine_config(place)))
        latent = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
        assert kv_compatibility._layout(cast("VllmConfig", latent)) == "default"
        layouts.add(kv_compatibility.terms(config)["kv_layout"])
    assert layouts == {"LBHNC"}


def created(settings: EngineSettings) -> Any:
    return vllm_arguments.create_config(vllm_arguments.resolve(settings).args, settings)


def layout(model: str, connector: Connector, *words: str) -> str | None:
    """Return the layout that vLLM is asked for on a GPU."""
    given = connector.engine_config(ConnectorPlace(role="agg", device="cuda"))
    config = created(EngineSettings(model=model, kv_transfer=given, argv=words))
    return cast("str | None", get_kv_connector_cache_layout(config))


def test_tiers_alone_keep_the_layers_of_a_block_together(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout(model, CONNECTORS["offload"]) == "LBHNC", "a CPU has no other"
    monkeypatch.setattr(tier_connector, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert layout(model, CONNECTORS["offload"]) == "BLHNC"
    assert layout(model, Multi([CONNECTORS["offload"], CONNECTORS["nixl"]])) == "LBHNC"
    drafts = '{"method": "ngram", "num_speculative_tokens": 2}'
    assert layout(model, CONNECTORS["offload"], "--speculative-config", drafts) == "LBHNC"


@pytest.mark.parametrize(
    "other",
    [
        {"use_mla": True},
        {"is_hybrid": True},
        {"get_sliding_window": lambda: 4096},
        {"hf_text_config": SimpleNamespace(layer_types=["sliding_attention", "full_attention"])},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_kinds_of_layers_stay_apart(other: dict[str, object]) -> None:
    plain = {
        "use_mla": False,
        "is_hybrid": False,
        "get_sliding_window": lambda: None,
        "hf_text_config": SimpleNamespace(layer_types=["full_attention"]),
    }
    cache = SimpleNamespace(cache_dtype="auto")
    for model, is_dense in ((plain, True), (plain | other, False)):
        config = SimpleNamespace(
            model_config=SimpleNamespace(**model), cache_config=cache, speculative_config=None
        )
        assert tier_connector._has_one_kind_of_layer(cast("Config", config)) is is_dense


def test_settings_of_vllms_own_tiers_reach_it_as_they_are(model: str) -> None:
    tiers = {"backpressure": {"max_pending": 8}, "cpu_bytes_to_use": 1 << 20}
    given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers}
    settings = EngineSettings(model=model, argv=("--kv-transfer-config", json.dumps(given)))
    assert arguments(vllm_arguments.resolve(settings)).kv_transfer_config.kv_connector_extra_config == tiers


def test_kvbm_hears_vllms_events_where_the_user_sends_them(model: str) -> None:
    given = CONNECTORS["kvbm"].engine_config(ConnectorPlace(role="agg", device="cuda"))
    events = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'
    found = vllm_arguments.resolve(
        EngineSettings(
            model=model,
            kv_transfer=given,
            merged_kv_events=MERGED,
            argv=("--kv-events-config", events, "--additional-config", '{"mine": 1}'),
        )
    )
    wanted = {"mine": 1, "consolidator_endpoints": ["tcp://127.0.0.1:5557", MERGED, MERGED]}
    assert arguments(found).additional_config == wanted


def test_the_router_hears_events_where_a_connector_merges_them_and_where_the_engine_publishes_them(
    model: str, tmp_path: Path
) -> None:
    """Uses vLLM's configuration with the addresses in it, as an engine with KVBM has."""
    merged = ("--additional-config", f'{{"consolidator_endpoints": ["ipc:///x", "{MERGED}", "{MERGED}"]}}')
    for argv, publishes, addresses in (
        (merged, True, {0: MERGED}),
        ((), True, {0: f"ipc://{tmp_path}/kv-events"}),
        (merged, False, {}),
    ):
        settings = EngineSettings(
            model=model, scratch_folder=str(tmp_path), publishes_kv_events=publishes, argv=argv
        )
        assert kv_events.addresses(created(settings), [0]) == (addresses, "")


def test_environment_has_what_a_connector_needs_and_what_the_user_set(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"LMCACHE_CHUNK_SIZE": "theirs"})
    vllm_environment.set_environment(
        EngineSettings(
            model=model,
            prometheus_folder="/scratch/prometheus",
            connector_environment={"LMCACHE_TRACK_USAGE": "false", "LMCACHE_CHUNK_SIZE": "64"},
            environment={"LMCACHE_CHUNK_SIZE": "theirs"},
        )
    )
    assert os.environ["PROMETHEUS_MULTIPROC_DIR"] == "/scratch/prometheus"
    assert os.environ["LMCACHE_TRACK_USAGE"] == "false"
    assert os.environ["LMCACHE_CHUNK_SIZE"] == "theirs"


def settings_of(*argv: str, scratch: str = "/scratch", **environment: str) -> EngineSettings:
    plan = worker_plan.parse(["--model", "m", *argv], environment)
    return factories.engine_settings(plan, environment, scratch)


def test_worker_gives_its_engine_a_folder_for_shared_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    found = settings_of("--connector", "lmcache", "--kv-offload-gb", "3")
    assert found.prometheus_folder == "/scratch/prometheus"
    assert found.connector_environment["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "3"
    theirs = settings_of("--connector", "lmcache", PROMETHEUS_MULTIPROC_DIR="/theirs")
    assert theirs.prometheus_folder == "/theirs"
    assert settings_of("--connector", "nixl").prometheus_folder is None


def test_worker_gives_its_engine_what_kvbm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    found = settings_of("--connector", "kvbm", DYN_KVBM_METRICS="true")
    assert found.connector_environment["DYN_KVBM_CPU_CACHE_GB"] == "5"
    assert str(found.merged_kv_events).startswith("tcp://127.0.0.1:")
    assert str(found.connector_metrics_url).endswith("/metrics")


def test_worker_gives_its_engine_its_part_of_the_tiers(model: str, tmp_path: Path) -> None:
    words = ("--kv-offload-gb", "2", "--kv-offload-disk", f"{tmp_path}:8", "--data-parallel-size", "2")
    plan = worker_plan.parse(["--model", model, *words], {})
    found = factories.engine_settings(plan, {}, "/scratch")
    assert found.host_tier_bytes == 2_000_000_000 and found.kv_transfer is not None
    extra = found.kv_transfer["kv_connector_extra_config"]
    (disk,) = extra["secondary_tiers"]
    assert (extra["cpu_bytes_to_use"], disk["limit_bytes"]) == (1_000_000_000, 4_000_000_000)
    assert disk["identity"] and disk["folder"] == str(tmp_path)
    spec = OffloadingSpecFactory.get_spec_cls(extra)
    assert issubclass(spec, TieringOffloadingSpec) and spec.__name__ == extra["spec_name"]


def test_who_brings_a_cache_only_when_asked() -> None:
    """Any other connector, alone or combined with one of these, may load a cache that nobody named."""
    named = kv_compatibility._ON_REQUEST | kv_compatibility._SKIPPING
    assert set(KVConnectorFactory._registry) >= named


@by_name
@by_role
def test_only_nixl_and_tiers_tell_logprobs_of_prompts(connector: Connector, role: str) -> None:
    given = connector.engine_config(ConnectorPlace(role=role, device="cuda"))
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**given))
    brings = kv_compatibility.connector_that_finds_caches(cast("VllmConfig", config))
    moves_only = packages(connector) <= {"nixl"} or (role == "decode" and "nixl" in connector.name)
    assert (brings is None) == moves_only
    to_others = kv_compatibility.connector_to_others(cast("VllmConfig", config))
    assert (to_others is None) == (connector.name == "offload"), "an engine with tiers alone may sleep"
