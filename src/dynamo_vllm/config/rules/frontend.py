"""Rules for the frontend's options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config.options.frontend import KNOWS_ADAPTERS
from dynamo_vllm.config.rules import bounds, flags, media_limits
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import FrontendOptions, GatewayOptions


def tls_needs_both_files(o: FrontendOptions | GatewayOptions) -> None:
    if (o.tls_cert_path is None) != (o.tls_key_path is None):
        raise ConfigError("--tls-cert-path and --tls-key-path go together; give both or neither")


def thresholds_are_shares(o: FrontendOptions) -> None:
    if o.busy_blocks is not None and not 0 < o.busy_blocks <= 1:
        raise ConfigError(f"--busy-blocks {o.busy_blocks} is not a share; use a number above 0 and up to 1")


def tier_weights_are_shares(o: FrontendOptions) -> None:
    for name, weight in bounds.values(o, ("router_host_cache_weight", "router_disk_cache_weight")):
        if not 0 <= weight <= 1:
            raise ConfigError(f"{name} {weight} is not a share; use a number from 0 to 1")


def frontend_threads_are_a_count(o: FrontendOptions) -> None:
    flags.threads_are_a_count(o.runtime_threads)


def frontend_migration_is_a_count(o: FrontendOptions) -> None:
    bounds.at_least(o, 0, "migration_limit")


def unreachable_is_a_time(o: FrontendOptions) -> None:
    if o.unreachable_seconds < 0:
        raise ConfigError(f"--unreachable-seconds {o.unreachable_seconds} must be 0 or more")


def numbers_are_large_enough(o: FrontendOptions) -> None:
    """Settings that the runtime would reject with its own message, or ignore."""
    bounds.at_least(o, 0, "drain_seconds", "error_wait_ms", "router_temperature", "kv_overlap_weight")
    bounds.at_least(o, 0, "router_ttl_seconds", "router_queue_seconds", "busy_prefill_tokens")
    bounds.at_least(o, 0, "kv_overlap_credit", "router_request_blocks")
    bounds.at_least(o, 1, "max_body_mb", "migration_max_seq_len")


def certificate_is_there(o: FrontendOptions | GatewayOptions) -> None:
    for name, path in bounds.values(o, ("tls_cert_path", "tls_key_path")):
        if not Path(path).is_file():
            raise ConfigError(f"{name} {path}: there is no such file")


def port_is_known(o: FrontendOptions) -> None:
    if o.port == 0:
        raise ConfigError("--port 0 does not choose a free port here; name one ('serve' finds a free one)")


def local_prefill_is_a_count(o: FrontendOptions) -> None:
    if o.local_prefill_tokens is not None and o.local_prefill_tokens < 1:
        raise ConfigError(f"--local-prefill-tokens {o.local_prefill_tokens} must be 1 or more, or left out")


def local_prefill_needs_the_kv_router(o: FrontendOptions) -> None:
    if o.local_prefill_tokens is not None and o.router != "kv":
        raise ConfigError(
            f"--local-prefill-tokens needs --router kv; --router {o.router} does not know what is cached"
        )


def router_knows_adapters(o: FrontendOptions) -> None:
    if o.lora_enabled and o.router not in KNOWS_ADAPTERS:
        raise ConfigError(
            f"--router {o.router} does not know which worker has a LoRA adapter, and the runtime refuses it; "
            f"use --router {', '.join(KNOWS_ADAPTERS)}, or --no-lora-enabled for one worker"
        )


def frontend_hosts_and_networks_are_valid(o: FrontendOptions) -> None:
    media_limits.media_hosts_are_names(o)
    media_limits.media_networks_are_networks(o)


def frontend_traces_have_an_address(o: FrontendOptions) -> None:
    flags.traces_have_an_address(o.otlp_endpoint)


RULES = (
    frontend_traces_have_an_address,
    router_knows_adapters,
    port_is_known,
    tls_needs_both_files,
    certificate_is_there,
    thresholds_are_shares,
    tier_weights_are_shares,
    frontend_threads_are_a_count,
    frontend_migration_is_a_count,
    numbers_are_large_enough,
    unreachable_is_a_time,
    local_prefill_is_a_count,
    local_prefill_needs_the_kv_router,
    frontend_hosts_and_networks_are_valid,
)
