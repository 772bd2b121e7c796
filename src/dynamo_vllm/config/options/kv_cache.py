"""Options of a worker for KV caches: connectors, transfer between workers, and KV events."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.requests import RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheOptions(RequestOptions):
    """A process that keeps KV caches, transfers them, and publishes their events."""

    connector: tuple[str, ...] = opt(
        (),
        "kv cache",
        "KV connectors in order: nixl, kvbm, or none; lmcache is known but refused (default: none, or nixl "
        "for a worker that hands its KV cache over, or fetches one).",
        env="DYN_CONNECTOR",
        metavar="NAME",
    )
    local_prefill_tokens: int | None = opt(
        None,
        "kv cache",
        "A prefill worker passes prompts with fewer tokens than this on to the decode worker.",
        env="DYN_VLLM_LOCAL_PREFILL_TOKENS",
        metavar="TOKENS",
    )
    kv_lease_seconds: int = opt(
        30,
        "kv cache",
        "How long a prefill worker keeps a KV cache that no decode worker fetches.",
        env="DYN_VLLM_KV_LEASE_SECONDS",
        metavar="SECONDS",
    )
    kv_offload_gb: float | None = opt(
        None,
        "kv cache",
        "Host memory in GB for KV caches that kvbm moves out of the engine (default: 5); kvbm's own "
        "variables override it.",
        env="DYN_VLLM_KV_OFFLOAD_GB",
        metavar="GB",
    )
    side_channel_host: str | None = opt(
        None,
        "kv cache",
        "Address where other engines request KV cache transfers (default: --bind-host, or the machine's "
        "address).",
        env="VLLM_NIXL_SIDE_CHANNEL_HOST",
        metavar="ADDRESS",
    )
    side_channel_port: int | None = opt(
        None,
        "kv cache",
        "First port of --side-channel-host, one per data-parallel rank (default: free ports).",
        env="VLLM_NIXL_SIDE_CHANNEL_PORT",
        metavar="PORT",
    )
    kv_events: bool | None = opt(
        None,
        "kv cache",
        "Publish KV events for the router (default: on when prefix caching is).",
        env="DYN_VLLM_KV_EVENTS",
    )
    kv_event_port: int | None = opt(
        None,
        "kv cache",
        "First port of KV events, one per data-parallel rank (default: a local socket or free ports).",
        env="DYN_VLLM_KV_EVENT_PORT",
        metavar="PORT",
    )
    enable_local_indexer: bool = opt(
        True, "kv cache", "Keep an index of this worker's KV blocks in the worker.", env="DYN_LOCAL_INDEXER"
    )
