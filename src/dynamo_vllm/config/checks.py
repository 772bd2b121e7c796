"""Rules that span several options: one function and one message each.

Every rule takes the parsed options and the flags left for the engine, and raises ConfigError.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import nodes
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import FrontendOptions, RuntimeOptions, ServeOptions, WorkerOptions

CONNECTORS = ("nixl", "lmcache", "kvbm", "none", "null")
ENDPOINT_TYPES = ("chat", "completions")
MULTIMODAL_ROLES = (
    "multimodal_worker",
    "multimodal_encode_worker",
    "multimodal_decode_worker",
    "multimodal_encode_prefill_worker",
    "multimodal_processor",
    "ec_processor",
    "vllm_native_encoder_worker",
)
MAX_SYSTEM_PORT = 32767
"""ai-dynamo-runtime 1.6 keeps this port in a signed 16-bit number."""
EngineFlags = Mapping[str, str | None]


_SHORT_FLAGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dp": "data_parallel_size",
    "-n": "nnodes",
    "-r": "node_rank",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
}
"""vLLM's short flags that our rules look at."""


def engine_flags(argv: Sequence[str]) -> dict[str, str | None]:
    """The engine's flags as the user wrote them: '--block-size 16' → {'block_size': '16'}."""
    found: dict[str, str | None] = {}
    last: str | None = None
    for word in argv:
        if word.startswith("--") or word.partition("=")[0] in _SHORT_FLAGS:
            flag_word, has_value, value = word.partition("=")
            name = _SHORT_FLAGS.get(flag_word, flag_word.lstrip("-").replace("-", "_").split(".")[0])
            last = None if has_value else name
            found[name] = value if has_value else None
        elif last is not None and found[last] is None:
            found[last] = word
    return found


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# --- worker ---------------------------------------------------------------------------------------------


def one_role(o: WorkerOptions, _: EngineFlags) -> None:
    named = [flag(n) for n in ("is_prefill_worker", "is_decode_worker") if getattr(o, n)]
    named += ["--disaggregation-mode"] if o.disaggregation_mode not in (None, o.role) else []
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} name different roles; a worker has one, give one of them")


def known_connectors(o: WorkerOptions, _: EngineFlags) -> None:
    for name in o.connector:
        if name not in CONNECTORS:
            raise ConfigError(f"--connector {name!r} is unknown; choose from {', '.join(CONNECTORS)}")


def none_stands_alone(o: WorkerOptions, _: EngineFlags) -> None:
    if len(o.connector) > 1 and {"none", "null"} & set(o.connector):
        raise ConfigError(
            f"--connector {' '.join(o.connector)}: none stands alone; leave it out or the others"
        )


def one_source_of_connectors(o: WorkerOptions, engine: EngineFlags) -> None:
    if o.connector and "kv_transfer_config" in engine:
        raise ConfigError(
            f"--connector {' '.join(o.connector)} cannot stand beside --kv-transfer-config; give one of them"
        )


def disaggregation_needs_a_connector(o: WorkerOptions, engine: EngineFlags) -> None:
    named = set(o.connector) - {"none", "null"}
    if (
        o.role in ("prefill", "decode")
        and o.engine != "fake"
        and not named
        and "kv_transfer_config" not in engine
    ):
        raise ConfigError(
            f"--disaggregation-mode {o.role} needs a way for the KV cache; add --connector nixl"
        )


def written_connector_is_json(_: WorkerOptions, engine: EngineFlags) -> None:
    written = engine.get("kv_transfer_config")
    if written is not None:
        json_object("--kv-transfer-config", written)


PACKAGES = {"NixlConnector": "nixl", "LMCacheConnectorV1": "lmcache", "DynamoConnector": "kvbm"}
"""vLLM's connector classes, and the package each comes with; it is also the connector's name."""
OFFLOADERS = ("lmcache", "kvbm")
"""Connectors that keep caches which leave the engine."""


def named_connectors(o: WorkerOptions, engine: EngineFlags) -> list[str]:
    """By --connector, or inside --kv-transfer-config."""
    written = engine.get("kv_transfer_config") or ""
    inside = [package for name, package in PACKAGES.items() if f'"{name}"' in written]
    return [*(name for name in o.connector if name not in ("none", "null")), *inside]


def connectors_are_named_once(o: WorkerOptions, _: EngineFlags) -> None:
    for name in o.connector:
        if o.connector.count(name) > 1:
            raise ConfigError(f"--connector {' '.join(o.connector)} names {name} twice; name it once")


def one_offloader(o: WorkerOptions, _: EngineFlags) -> None:
    if set(OFFLOADERS) <= set(o.connector):
        raise ConfigError(
            f"--connector {' '.join(o.connector)}: lmcache and kvbm both keep caches that leave the engine; "
            "give one of them"
        )


def offload_size_has_a_user(o: WorkerOptions, engine: EngineFlags) -> None:
    if o.kv_offload_gb is not None and not set(OFFLOADERS) & set(named_connectors(o, engine)):
        raise ConfigError(
            f"--kv-offload-gb {o.kv_offload_gb:g} needs a connector that uses it; "
            "add --connector kvbm, or leave it out"
        )


def offload_fits_memory(o: WorkerOptions, _: EngineFlags) -> None:
    if o.kv_offload_gb is None:
        return
    has_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    if not 0 < o.kv_offload_gb < has_gb:
        raise ConfigError(
            f"--kv-offload-gb {o.kv_offload_gb:g} is no share of this machine's memory; "
            f"use a number above 0 and below {has_gb:.0f}"
        )


def kvbm_has_one_rank(o: WorkerOptions, engine: EngineFlags) -> None:
    ranks = engine.get("data_parallel_size") or "1"
    if "kvbm" in named_connectors(o, engine) and ranks != "1":
        raise ConfigError(
            f"--data-parallel-size {ranks} cannot stand beside the connector kvbm, whose ports serve one; "
            "start a worker per rank instead"
        )


def kvbm_takes_plain_prompts(o: WorkerOptions, engine: EngineFlags) -> None:
    """KVBM 1.6.1 raises inside vLLM's scheduler, which ends the engine, at the first such request."""
    asked = {
        "--enable-multimodal": o.enable_multimodal,
        "--enable-lora": o.lora_enabled or "enable_lora" in engine,
        "--enable-prompt-embeds": o.enable_prompt_embeds or "enable_prompt_embeds" in engine,
    }
    named = [name for name, is_asked in asked.items() if is_asked]
    if named and "kvbm" in named_connectors(o, engine):
        raise ConfigError(f"{named[0]} cannot stand beside the connector kvbm; leave one of them out")


def lmcache_reads_the_cache(o: WorkerOptions, engine: EngineFlags) -> None:
    """vLLM keeps K and V side by side in one row per head, for every dtype and attention backend; LMCache
    inside the engine (all releases up to 0.5.6) takes such a row for half its width: it saves and restores
    the wrong rows, other requests' among them, reports hits, and answers turn out wrong."""
    if o.engine != "fake" and "lmcache" in named_connectors(o, engine):
        raise ConfigError(
            "the connector lmcache: LMCache 0.5.6 mixes up the caches of vLLM 0.30 and answers are wrong; "
            "use --connector kvbm"
        )


def connector_is_installed(o: WorkerOptions, engine: EngineFlags) -> None:
    if o.engine == "fake":
        return
    for package in named_connectors(o, engine):
        if package in PACKAGES.values() and not is_installed(package):
            raise ConfigError(
                f"the connector {package} is not installed; run: pip install 'dynamo-vllm[{package}]'"
            )


def disaggregation_takes_tokens(o: WorkerOptions, _: EngineFlags) -> None:
    if o.role in ("prefill", "decode") and o.use_vllm_tokenizer:
        raise ConfigError(
            f"--use-vllm-tokenizer cannot stand beside --disaggregation-mode {o.role}; leave it out"
        )


def one_multimodal_role(o: WorkerOptions, _: EngineFlags) -> None:
    named = [flag(n) for n in MULTIMODAL_ROLES if getattr(o, n)]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are different multimodal roles; give one of them")


def multimodal_needs_its_switch(o: WorkerOptions, _: EngineFlags) -> None:
    names = (*MULTIMODAL_ROLES, "route_to_encoder", "frontend_decoding", "mm_prompt_template")
    named = [flag(n) for n in names if getattr(o, n)]
    if named and not o.enable_multimodal:
        raise ConfigError(f"{named[0]} needs --enable-multimodal; add it")


def example_encoder_cache_needs_a_folder(o: WorkerOptions, _: EngineFlags) -> None:
    if o.ec_connector_backend == "ECExampleConnector" and not o.ec_storage_path:
        raise ConfigError("--ec-connector-backend ECExampleConnector needs --ec-storage-path FOLDER")


def encoder_cache_flags_need_a_user(o: WorkerOptions, _: EngineFlags) -> None:
    named = [flag(n) for n in ("ec_connector_backend", "ec_storage_path", "ec_extra_config") if getattr(o, n)]
    if named and not (o.vllm_native_encoder_worker or o.ec_consumer_mode):
        raise ConfigError(f"{named[0]} needs --vllm-native-encoder-worker or --ec-consumer-mode")


def extra_encoder_config_is_json(o: WorkerOptions, _: EngineFlags) -> None:
    if o.ec_extra_config is not None:
        json_object("--ec-extra-config", o.ec_extra_config)


def stages_need_omni(o: WorkerOptions, _: EngineFlags) -> None:
    if o.stage_configs_path and not o.omni:
        raise ConfigError(
            f"--stage-configs-path {o.stage_configs_path} needs --omni; add it or leave the file out"
        )


def omni_has_no_connector(o: WorkerOptions, _: EngineFlags) -> None:
    if o.omni and set(o.connector) - {"none", "null"}:
        raise ConfigError(f"--connector {' '.join(o.connector)} cannot stand beside --omni; leave it out")


def local_prefill_is_not_negative(o: WorkerOptions, _: EngineFlags) -> None:
    if o.local_prefill_tokens is not None and o.local_prefill_tokens < 1:
        raise ConfigError(f"--local-prefill-tokens {o.local_prefill_tokens} must be 1 or more, or left out")


def kv_event_port_is_registered(o: WorkerOptions, _: EngineFlags) -> None:
    if o.kv_event_port is not None and not 1024 <= o.kv_event_port <= 49151:
        raise ConfigError(f"DYN_VLLM_KV_EVENT_PORT={o.kv_event_port} is out of range; use 1024 to 49151")


def side_channel_port_is_a_port(o: WorkerOptions, _: EngineFlags) -> None:
    if o.side_channel_port is not None and not 1 <= o.side_channel_port <= 65535:
        raise ConfigError(f"--side-channel-port {o.side_channel_port} is no port; use 1 to 65535")


def kv_events_have_one_source(o: WorkerOptions, engine: EngineFlags) -> None:
    if "kv_events_config" in engine and (o.kv_event_port is not None or o.kv_events is not None):
        raise ConfigError(
            "--kv-events-config already says where KV events go; leave --kv-event-port/--kv-events out"
        )


def known_endpoint_types(o: WorkerOptions, _: EngineFlags) -> None:
    for name in o.endpoint_types:
        if name not in ENDPOINT_TYPES:
            raise ConfigError(
                f"--endpoint-types {name!r} is unknown; choose from {', '.join(ENDPOINT_TYPES)}"
            )
    if not o.endpoint_types:
        raise ConfigError("--endpoint-types is empty; give chat, completions or both")


def template_exists(o: WorkerOptions, _: EngineFlags) -> None:
    if o.custom_jinja_template and not Path(o.custom_jinja_template).is_file():
        raise ConfigError(f"--custom-jinja-template {o.custom_jinja_template}: there is no such file")


def address_has_three_parts(o: WorkerOptions, _: EngineFlags) -> None:
    parts = o.address.split(".")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(f"{o.address!r} is no address; write --endpoint dyn://namespace.component.endpoint")


def budgets_are_positive(o: WorkerOptions, _: EngineFlags) -> None:
    for name in ("health_seconds", "canary_seconds", "canary_timeout_seconds"):
        if getattr(o, name) <= 0:
            raise ConfigError(f"{flag(name)} {getattr(o, name)} must be above 0")
    if o.drain_seconds < 0:
        raise ConfigError(f"--drain-seconds {o.drain_seconds} must not be negative")


def worker_migration_is_a_count(o: WorkerOptions, _: EngineFlags) -> None:
    if o.migration_limit < 0:
        raise ConfigError(f"--migration-limit {o.migration_limit} must be 0 or more")


def fake_settings_need_the_fake_engine(o: WorkerOptions, _: EngineFlags) -> None:
    if o.fake_engine is not None and o.engine != "fake":
        raise ConfigError("--fake-engine describes the fake engine; add --engine fake or leave it out")
    if o.fake_engine is not None:
        json_object("--fake-engine", o.fake_engine)


def fake_engine_takes_no_engine_flags(o: WorkerOptions, engine: EngineFlags) -> None:
    if o.engine == "fake" and engine:
        raise ConfigError(f"{flag(next(iter(engine)))} is a flag of vLLM; the fake engine does not know it")


def gpu_memory_service_is_installed(_: WorkerOptions, engine: EngineFlags) -> None:
    if engine.get("load_format") == "gms" and not is_installed("gpu_memory_service"):
        raise ConfigError(
            "--load-format gms needs the package gpu_memory_service, which is not on PyPI; "
            "install it from the Dynamo sources or use another load format"
        )


def dump_has_a_folder(o: WorkerOptions, _: EngineFlags) -> None:
    if o.dump_config_to and not Path(o.dump_config_to).resolve().parent.is_dir():
        raise ConfigError(f"--dump-config-to {o.dump_config_to}: there is no such folder")


def kv_events_can_be_heard(o: WorkerOptions, engine: EngineFlags) -> None:
    node, endpoint = node_of(o, engine), _written_event_endpoint(engine)
    listens = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
    if node.is_headless and node.event_port and endpoint and listens:
        raise ConfigError(
            f"--kv-events-config: {endpoint} is heard on this node only; write tcp://{node.leader}:PORT, "
            "with the leader's port"
        )
    if not node.is_headless and not listens:
        raise ConfigError(
            f"--kv-events-config: vLLM connects to {endpoint} instead of listening and no event arrives; "
            "write tcp://*:PORT"
        )


def kv_events_of_each_rank_have_a_port(o: WorkerOptions, engine: EngineFlags) -> None:
    endpoint = _written_event_endpoint(engine)
    if endpoint.startswith("ipc://") and node_of(o, engine).all_ranks > 1:
        raise ConfigError(
            f"--kv-events-config: {endpoint} is one address for several ranks; write tcp://*:PORT, "
            "each rank adds its number"
        )


def _written_event_endpoint(engine: EngineFlags) -> str:
    written = engine.get("kv_events_config")
    return str(json_object("--kv-events-config", written).get("endpoint", "")) if written else ""


def node_of(o: WorkerOptions, engine: EngineFlags) -> nodes.Node:
    return nodes.of(o.headless, engine)


_BALANCERS = {
    "--data-parallel-external-lb": ("data_parallel_rank", "data_parallel_external_lb"),
    "--data-parallel-hybrid-lb": ("data_parallel_hybrid_lb",),
}
"""Ways to share ranks out among workers, and the flags that ask for them."""


def ranks_are_shared_out_one_way(o: WorkerOptions, engine: EngineFlags) -> None:
    asked = [way for way, names in _BALANCERS.items() if set(names) & set(engine)]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are different ways to share ranks out; give one of them")
    if asked and o.headless:
        raise ConfigError(
            f"--headless cannot stand beside {asked[0]} (or --data-parallel-rank), with which each node "
            "serves its own ranks; leave --headless out, or write --data-parallel-start-rank"
        )


def one_worker_per_process(_: WorkerOptions, engine: EngineFlags) -> None:
    if "data_parallel_multi_port_external_lb" in engine:
        raise ConfigError(
            "--data-parallel-multi-port-external-lb starts several servers in one process; start one worker "
            "per rank with --data-parallel-rank"
        )


def node_rank_is_one_of_the_nodes(_: WorkerOptions, engine: EngineFlags) -> None:
    count, rank = engine.get("nnodes") or "1", engine.get("node_rank") or "0"
    if count.isdigit() and rank.isdigit() and int(rank) >= int(count):
        fix = f"use 0 to {int(count) - 1}" if int(count) > 1 else "say how many there are with --nnodes"
        raise ConfigError(f"--node-rank {rank} is not among --nnodes {count}; {fix}")


def headless_belongs_to_a_worker(o: WorkerOptions, engine: EngineFlags) -> None:
    if not o.headless:
        return
    node = node_of(o, engine)
    if node.all_ranks == 1 and node.node_rank == 0:
        raise ConfigError(
            "--headless runs engines for a worker on another node; say which: --nnodes N --node-rank 1, or "
            "--data-parallel-size N --data-parallel-size-local 1 --data-parallel-start-rank 1"
        )


def start_rank_says_how_many(_: WorkerOptions, engine: EngineFlags) -> None:
    # vLLM 0.30 forgets the start rank without it, and the leader waits for ever.
    if "data_parallel_start_rank" in engine and "data_parallel_size_local" not in engine:
        raise ConfigError(
            f"--data-parallel-start-rank {engine['data_parallel_start_rank']} needs "
            "--data-parallel-size-local, the number of ranks on this node"
        )


def ranks_of_a_node_are_among_all(o: WorkerOptions, engine: EngineFlags) -> None:
    node = node_of(o, engine)
    if node.first_rank + node.local_ranks > node.all_ranks:
        raise ConfigError(
            f"this node has {node.local_ranks} ranks from rank {node.first_rank} on, of "
            f"--data-parallel-size {node.all_ranks}; set --data-parallel-size to the ranks of all nodes"
        )


def several_nodes_name_their_leader(o: WorkerOptions, engine: EngineFlags) -> None:
    node = node_of(o, engine)
    name = "data_parallel_address" if node.all_ranks > 1 else "master_addr"
    if (node.is_headless or node.has_followers) and not {name, "master_addr"} & set(engine):
        raise ConfigError(
            f"several nodes need to know their leader; add {flag(name)} ADDRESS, the same on every node"
        )


def model_is_named(o: WorkerOptions, _: EngineFlags) -> None:
    if not o.model:
        raise ConfigError("--model is missing; give a folder or a hub id")


def events_of_other_nodes_reach_the_leader(o: WorkerOptions, engine: EngineFlags) -> None:
    # vLLM 0.30 takes any address with :: for one to listen on.
    node = node_of(o, engine)
    if node.event_port and ":" in node.leader and o.kv_events is not False:
        raise ConfigError(
            f"KV events of other nodes cannot be sent to {node.leader}; give an IPv4 address of the leader, "
            "or add --no-kv-events"
        )


@dataclass(frozen=True, slots=True)
class NotYet:
    """A capability whose flags are known but which this version does not have."""

    name: str
    asked: Callable[[WorkerOptions, EngineFlags], bool]


NOT_YET: tuple[NotYet, ...] = (
    NotYet("--disaggregation-mode encode", lambda o, _: o.role == "encode"),
    NotYet("--enable-multimodal", lambda o, _: o.enable_multimodal),
    NotYet("--ec-consumer-mode", lambda o, _: o.ec_consumer_mode),
    NotYet("--omni", lambda o, _: o.omni),
    NotYet("--enable-prompt-embeds", lambda o, e: o.enable_prompt_embeds or "enable_prompt_embeds" in e),
    NotYet(
        "DYN_LORA_ENABLED / --enable-lora",
        lambda o, e: o.lora_enabled or bool(o.lora_path) or "enable_lora" in e,
    ),
)


def is_available(o: WorkerOptions, engine: EngineFlags) -> None:
    for capability in NOT_YET:
        if capability.asked(o, engine):
            raise ConfigError(f"{capability.name} is not available yet in this version")


WORKER_RULES = (
    one_role,
    known_connectors,
    none_stands_alone,
    one_source_of_connectors,
    connectors_are_named_once,
    one_offloader,
    offload_size_has_a_user,
    offload_fits_memory,
    kvbm_has_one_rank,
    kvbm_takes_plain_prompts,
    written_connector_is_json,
    lmcache_reads_the_cache,
    connector_is_installed,
    disaggregation_needs_a_connector,
    disaggregation_takes_tokens,
    one_multimodal_role,
    multimodal_needs_its_switch,
    example_encoder_cache_needs_a_folder,
    encoder_cache_flags_need_a_user,
    extra_encoder_config_is_json,
    stages_need_omni,
    omni_has_no_connector,
    local_prefill_is_not_negative,
    kv_event_port_is_registered,
    side_channel_port_is_a_port,
    kv_events_have_one_source,
    known_endpoint_types,
    template_exists,
    address_has_three_parts,
    budgets_are_positive,
    worker_migration_is_a_count,
    fake_settings_need_the_fake_engine,
    fake_engine_takes_no_engine_flags,
    gpu_memory_service_is_installed,
    dump_has_a_folder,
    kv_events_can_be_heard,
    kv_events_of_each_rank_have_a_port,
    ranks_are_shared_out_one_way,
    one_worker_per_process,
    node_rank_is_one_of_the_nodes,
    headless_belongs_to_a_worker,
    start_rank_says_how_many,
    ranks_of_a_node_are_among_all,
    several_nodes_name_their_leader,
    events_of_other_nodes_reach_the_leader,
    model_is_named,
    is_available,
)


def check_worker(options: WorkerOptions, engine_argv: Sequence[str]) -> None:
    """Refuse what cannot work, before anything heavy is imported."""
    flags = engine_flags(engine_argv)
    check_runtime(options)
    for rule in WORKER_RULES:
        rule(options, flags)


# --- every process --------------------------------------------------------------------------------------


def port_is_a_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"{name} {port} is no port; use 0 to 65535")


def check_runtime(o: RuntimeOptions) -> None:
    if o.system_port is not None and not 0 <= o.system_port <= MAX_SYSTEM_PORT:
        raise ConfigError(
            f"--system-port {o.system_port} is out of range; the runtime takes 0 to {MAX_SYSTEM_PORT}"
        )
    if not o.namespace or "." in o.namespace or "/" in o.namespace:
        raise ConfigError(f"--namespace {o.namespace!r} must be one word without dots or slashes")


# --- frontend -------------------------------------------------------------------------------------------


def tls_needs_both_files(o: FrontendOptions) -> None:
    if (o.tls_cert_path is None) != (o.tls_key_path is None):
        raise ConfigError("--tls-cert-path and --tls-key-path go together; give both or neither")


def thresholds_are_shares(o: FrontendOptions) -> None:
    if o.busy_blocks is not None and not 0 < o.busy_blocks <= 1:
        raise ConfigError(f"--busy-blocks {o.busy_blocks} is a share; use a number above 0 and up to 1")


def frontend_migration_is_a_count(o: FrontendOptions) -> None:
    if o.migration_limit < 0:
        raise ConfigError(f"--migration-limit {o.migration_limit} must be 0 or more")


def temperature_is_not_negative(o: FrontendOptions) -> None:
    if o.router_temperature < 0:
        raise ConfigError(f"--router-temperature {o.router_temperature} must be 0 or more")


def port_is_known(o: FrontendOptions) -> None:
    if o.port == 0:
        raise ConfigError("--port 0 takes no free port here; name one ('serve' finds a free one itself)")


def local_prefill_is_a_count(o: FrontendOptions) -> None:
    if o.local_prefill_tokens is not None and o.local_prefill_tokens < 1:
        raise ConfigError(f"--local-prefill-tokens {o.local_prefill_tokens} must be 1 or more, or left out")


def local_prefill_needs_the_kv_router(o: FrontendOptions) -> None:
    if o.local_prefill_tokens is not None and o.router != "kv":
        raise ConfigError(
            f"--local-prefill-tokens needs --router kv; --router {o.router} does not know what is cached"
        )


FRONTEND_RULES = (
    port_is_known,
    tls_needs_both_files,
    thresholds_are_shares,
    frontend_migration_is_a_count,
    temperature_is_not_negative,
    local_prefill_is_a_count,
    local_prefill_needs_the_kv_router,
)


def check_frontend(options: FrontendOptions) -> None:
    check_runtime(options)
    port_is_a_port("--port", options.port)
    for rule in FRONTEND_RULES:
        rule(options)


# --- serve ----------------------------------------------------------------------------------------------


def there_is_a_worker(o: ServeOptions) -> None:
    for name in ("workers", "prefill", "decode"):
        count = getattr(o, name)
        if count is not None and count < 1:
            raise ConfigError(f"{flag(name)} {count} must be 1 or more")


def prefill_and_decode_go_together(o: ServeOptions) -> None:
    if o.prefill is not None and o.decode is None:
        raise ConfigError(
            f"--prefill {o.prefill} needs workers that answer; add --decode N, or use --workers alone"
        )
    if o.decode is not None and o.prefill is None:
        raise ConfigError(
            f"--decode {o.decode} needs workers that compute prompts; add --prefill N, or use --workers alone"
        )


def workers_or_roles(o: ServeOptions) -> None:
    if o.workers is not None and o.prefill is not None:
        raise ConfigError(
            f"--workers {o.workers} cannot stand beside --prefill and --decode; give one or the others"
        )


def restarts_are_a_count(o: ServeOptions) -> None:
    if o.restarts < 0:
        raise ConfigError(f"--restarts {o.restarts} must be 0 or more")


def start_has_time(o: ServeOptions) -> None:
    if o.start_seconds <= 0:
        raise ConfigError(f"--start-seconds {o.start_seconds} must be above 0")


SERVE_RULES = (
    there_is_a_worker,
    prefill_and_decode_go_together,
    workers_or_roles,
    restarts_are_a_count,
    start_has_time,
)


def check_serve(options: ServeOptions) -> None:
    for rule in SERVE_RULES:
        rule(options)


def json_object(name: str, text: str) -> dict[str, object]:
    """The JSON object in `text`, or a refusal that names the flag."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{name} is not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object")
    return value
