"""Rules for roles and KV connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config.options.worker import OLDER_MODES
from dynamo_vllm.config.rules import flags
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags

CONNECTORS = ("nixl", "offload", "lmcache", "kvbm", "none", "null")


PACKAGES = {"NixlConnector": "nixl", "LMCacheConnectorV1": "lmcache", "DynamoConnector": "kvbm"}
"""vLLM's connector classes, and the package each comes with; it is also the connector's name."""


OFFLOADERS = ("offload", "lmcache", "kvbm")
"""Connectors that store KV caches which leave the engine."""


def one_role(o: WorkerOptions, _: EngineFlags) -> None:
    named = {flags.flag(name): role for name, role in o.older_roles.items()}
    if o.disaggregation_mode is not None:
        mode = o.disaggregation_mode
        named[f"--disaggregation-mode {mode}"] = OLDER_MODES.get(mode, mode)
    if len(set(named.values())) > 1:
        raise ConfigError(f"{' and '.join(named)} name different roles; a worker has one, give one of them")


def known_connectors(o: WorkerOptions, _: EngineFlags) -> None:
    for name in o.connector:
        if name not in CONNECTORS:
            raise ConfigError(f"--connector {name!r} is unknown; choose from {', '.join(CONNECTORS)}")


def none_is_the_only_connector(o: WorkerOptions, _: EngineFlags) -> None:
    if len(o.connector) > 1 and {"none", "null"} & set(o.connector):
        raise ConfigError(
            f"--connector {' '.join(o.connector)}: none cannot be combined with others; leave it or the "
            "others out"
        )


def one_source_of_connectors(o: WorkerOptions, engine: EngineFlags) -> None:
    if o.connector and "kv_transfer_config" in engine:
        raise ConfigError(
            f"--connector {' '.join(o.connector)} cannot be combined with --kv-transfer-config; give one "
            "of them"
        )


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
    named = [name for name in OFFLOADERS if name in o.connector]
    if len(named) > 1:
        raise ConfigError(
            f"--connector {' '.join(o.connector)}: {' and '.join(named)} each store caches outside the "
            "engine; give one of them"
        )


def kvbm_has_one_rank(o: WorkerOptions, engine: EngineFlags) -> None:
    ranks = engine.get("data_parallel_size") or "1"
    if "kvbm" in named_connectors(o, engine) and ranks != "1":
        raise ConfigError(
            f"--data-parallel-size {ranks} cannot be combined with the connector kvbm, which serves one "
            "rank; "
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
        raise ConfigError(f"{named[0]} cannot be combined with the connector kvbm; leave one of them out")


def written_connector_is_json(_: WorkerOptions, engine: EngineFlags) -> None:
    written = engine.get("kv_transfer_config")
    if written is not None:
        flags.json_object("--kv-transfer-config", written)


def lmcache_is_refused(o: WorkerOptions, engine: EngineFlags) -> None:
    """vLLM keeps K and V side by side in one row per head, for every dtype and attention backend. LMCache
    inside the engine (all releases up to 0.5.6) assumes half that width: it saves and restores the wrong
    rows, also of other requests, reports hits, and answers are wrong.
    """
    if o.engine != "fake" and "lmcache" in named_connectors(o, engine):
        raise ConfigError(
            "the connector lmcache: LMCache 0.5.6 mixes up the caches of vLLM 0.30 and answers are wrong; "
            "use --kv-offload-gb"
        )


def lmcache_server_is_refused(o: WorkerOptions, engine: EngineFlags) -> None:
    """LMCache as a server beside the engine (0.5.6) gave back other caches than it was given: on an H200,
    vLLM 0.32.0, none of 9 reloaded prompts was answered as when cold; in chunks of 256 requests failed.
    """
    by_size = engine.get("kv_offloading_backend") == "lmcache"
    if o.engine != "fake" and (by_size or '"LMCacheMPConnector"' in (engine.get("kv_transfer_config") or "")):
        raise ConfigError(
            "LMCacheMPConnector: LMCache 0.5.6 mixes up the caches of vLLM 0.32 and answers are wrong; "
            "use --kv-offload-gb"
        )


def connector_is_installed(o: WorkerOptions, engine: EngineFlags) -> None:
    if o.engine == "fake":
        return
    for package in named_connectors(o, engine):
        if package in PACKAGES.values() and not flags.is_installed(package):
            raise ConfigError(
                f"the connector {package} is not installed; run: pip install 'dynamo-vllm[{package}]'"
            )


def disaggregation_needs_a_connector(o: WorkerOptions, engine: EngineFlags) -> None:
    named = set(o.connector) - {"none", "null"}
    if (
        o.card.hands_over_kv
        and o.engine != "fake"
        and not o.omni  # which has no such roles, another rule says
        and not named
        and "kv_transfer_config" not in engine
    ):
        raise ConfigError(f"--disaggregation-mode {o.role} needs a KV connector; add --connector nixl")


def disaggregation_takes_tokens(o: WorkerOptions, _: EngineFlags) -> None:
    if o.card.hands_over_kv and o.use_vllm_tokenizer:
        raise ConfigError(
            f"--use-vllm-tokenizer cannot be combined with --disaggregation-mode {o.role}; leave it out"
        )


def local_prefill_is_not_negative(o: WorkerOptions, _: EngineFlags) -> None:
    if o.local_prefill_tokens is not None and o.local_prefill_tokens < 1:
        raise ConfigError(f"--local-prefill-tokens {o.local_prefill_tokens} must be 1 or more, or left out")


def lease_leaves_time_to_fetch(o: WorkerOptions, _: EngineFlags) -> None:
    # A decode worker fetches nothing whose lease ends within a second.
    if o.kv_lease_seconds < 2:
        raise ConfigError(
            f"--kv-lease-seconds {o.kv_lease_seconds} leaves no time for the transfer; use 2 or more"
        )


def side_channel_port_is_a_port(o: WorkerOptions, _: EngineFlags) -> None:
    if o.side_channel_port is not None and not 1 <= o.side_channel_port <= 65535:
        raise ConfigError(f"--side-channel-port {o.side_channel_port} is not a port; use 1 to 65535")


RULES = (
    one_role,
    known_connectors,
    none_is_the_only_connector,
    one_source_of_connectors,
    connectors_are_named_once,
    one_offloader,
    kvbm_has_one_rank,
    kvbm_takes_plain_prompts,
    written_connector_is_json,
    lmcache_is_refused,
    lmcache_server_is_refused,
    connector_is_installed,
    disaggregation_needs_a_connector,
    disaggregation_takes_tokens,
    local_prefill_is_not_negative,
    lease_leaves_time_to_fetch,
    side_channel_port_is_a_port,
)
