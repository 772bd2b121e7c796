"""Translates the options of a frontend into those of the runtime's router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.llm import KvRouterConfig, RouterConfig, RouterMode

if TYPE_CHECKING:
    from dynamo_vllm.config.options import FrontendOptions

_ROUTER_MODES = {
    "kv": "KV",
    "round-robin": "RoundRobin",
    "random": "Random",
    "power-of-two": "PowerOfTwoChoices",
    "least-loaded": "LeastLoaded",
    "direct": "Direct",
    "device-aware-weighted": "DeviceAwareWeighted",
}


def router_config(options: FrontendOptions) -> RouterConfig:
    # The threshold is a share of the batch that a worker registers, which is what it computes in a second.
    kv = kv_router_config(options, queue_seconds(options)) if options.router == "kv" else None
    return RouterConfig(
        getattr(RouterMode, _ROUTER_MODES[options.router]),
        kv,
        active_decode_blocks_threshold=options.busy_blocks,
        active_prefill_tokens_threshold=options.busy_prefill_tokens,
    )


def queue_seconds(options: FrontendOptions) -> float:
    """0 where too many waiting tokens are to be refused: held back, they would never reach the worker."""
    return options.router_queue_seconds if options.busy_prefill_tokens is None else 0.0


def kv_router_config(options: FrontendOptions, queue_threshold: float) -> KvRouterConfig:
    local = options.local_prefill_tokens
    return KvRouterConfig(
        prefill_load_scale=options.kv_overlap_weight,
        overlap_score_credit=options.kv_overlap_credit,
        host_cache_hit_weight=options.router_host_cache_weight,
        disk_cache_hit_weight=options.router_disk_cache_weight,
        decode_active_request_weight=options.router_request_blocks,
        router_temperature=options.router_temperature,
        use_kv_events=options.use_kv_events,
        router_ttl_secs=options.router_ttl_seconds,
        router_replica_sync=options.router_replica_sync,
        router_track_output_blocks=options.router_track_output_blocks,
        router_queue_threshold=queue_threshold or None,
        router_queue_policy=options.router_queue_policy,
        conditional_disagg_enabled=local is not None,
        conditional_disagg_eff_isl_threshold=local or 0,
        # Any cached block suffices. The runtime accepts no ratio above 1 and needs less than it, so a prompt
        # without a cached block always goes to a prefill worker, however short it is.
        conditional_disagg_eff_isl_ratio_threshold=1.0,
    )
