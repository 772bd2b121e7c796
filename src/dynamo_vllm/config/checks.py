"""Runs every rule over options, before anything heavy is imported. A rule raises ConfigError with the fix.

A new rule is a function in `config/rules/`, listed in its table, with a case in
`tests/unit/config/test_checks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config import planes
from dynamo_vllm.config.rules import (
    admin,
    bench,
    bench_local,
    connectors,
    export,
    flags,
    frontend,
    kv_tiers,
    lora,
    media,
    media_limits,
    omni,
    ranks,
    serve,
    worker,
)
from dynamo_vllm.config.rules.gateway import keys, serving
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import (
        AdminOptions,
        ConsoleOptions,
        ConsoleSettings,
        ExportOptions,
        FindOptions,
        FrontendOptions,
        GatewayOptions,
        LoadOptions,
        PlaneOptions,
        PoolingBenchOptions,
        ReachOptions,
        RoutingOptions,
        RuntimeOptions,
        ScaleOptions,
        ServeOptions,
    )
    from dynamo_vllm.config.options.gateway.keys import DatabaseOptions
    from dynamo_vllm.config.worker_plan import WorkerPlan

MAX_SYSTEM_PORT = 32767
"""ai-dynamo-runtime 1.6 keeps this port in a signed 16-bit number."""
WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")
MIN_LEASE_SECONDS = 5
"""etcd's own clocks are no finer than a second or two."""
WORKER_RULES = (
    *admin.WORKER_RULES,
    *kv_tiers.RULES,
    *connectors.RULES,
    *lora.RULES,
    *media.RULES,
    *media_limits.RULES,
    *omni.RULES,
    *ranks.RULES,
    *worker.RULES,
)
LOCAL_RULES: tuple[object, ...] = (
    connectors.connector_is_installed,
    kv_tiers.tier_fits_memory,
    kv_tiers.tier_fits_shared_memory,
    kv_tiers.disk_is_no_file,
    kv_tiers.tier_fits_disk,
    frontend.certificate_is_there,
    serving.gateway_certificate_is_there,
    media.nixl_for_media_is_installed,
    media_limits.media_folder_is_a_folder,
    omni.stage_file_exists,
    worker.dump_has_a_folder,
    worker.gpu_memory_service_is_installed,
    worker.template_exists,
)
FRONTEND_RULES = frontend.RULES
GATEWAY_RULES = serving.RULES
FIND_RULES = admin.FIND_RULES
ADMIN_RULES = admin.RULES
KEYS_RULES = keys.RULES
SERVE_RULES = serve.RULES
CONSOLE_RULES = admin.CONSOLE_RULES
EXPORT_RULES = export.RULES
LOAD_RULES = bench.RULES
PLANE_RULES = bench_local.PLANE_RULES
POOLING_RULES = (*bench_local.POOLING_RULES, bench.watched)
ROUTING_RULES = bench_local.ROUTING_RULES
SCALE_RULES = bench_local.SCALE_RULES


def check_worker(plan: WorkerPlan, *, elsewhere: bool = False, starts: bool = False) -> None:
    """Reject what cannot work, before anything heavy is imported.

    A worker that will run `elsewhere` needs no packages and no files here. One that `starts` may do so again
    after its disk for KV caches was lost, and can do without.
    """
    check_runtime(plan.options)
    left_out = (*(LOCAL_RULES if elsewhere else ()), *(kv_tiers.STATES if starts else ()))
    for rule in WORKER_RULES:
        if rule not in left_out:
            rule(plan.options, plan.flags)


def check_runtime(o: RuntimeOptions) -> None:
    if o.system_port is not None and not 0 <= o.system_port <= MAX_SYSTEM_PORT:
        raise ConfigError(
            f"--system-port {o.system_port} is out of range; the runtime takes 0 to {MAX_SYSTEM_PORT}"
        )
    if o.discovery_backend == "mem":
        raise ConfigError(
            "--discovery-backend mem works inside one process only, so no other process would find this one; "
            "use file on one machine, etcd or kubernetes on several"
        )
    if o.etcd_lease_seconds is not None and o.etcd_lease_seconds < MIN_LEASE_SECONDS:
        raise ConfigError(
            f"--etcd-lease-seconds {o.etcd_lease_seconds} is too short; use {MIN_LEASE_SECONDS} or more"
        )
    check_reach(o)


def check_reach(o: ReachOptions) -> None:
    if not o.namespace or "." in o.namespace or "/" in o.namespace:
        raise ConfigError(f"--namespace {o.namespace!r} must be one word without dots or slashes")
    if o.bind_host in WILDCARD_HOSTS:
        raise ConfigError(
            f"--bind-host {o.bind_host} is not an address that others can connect to; give an address of "
            "this machine, or leave it out to use that of the default route"
        )
    planes.check_addresses("--etcd-endpoints", o.etcd_endpoints, ("http", "https"))
    planes.check_addresses("--nats-server", o.nats_server, ("nats", "tls"))


def check_frontend(options: FrontendOptions, *, elsewhere: bool = False) -> None:
    check_runtime(options)
    flags.port_is_a_port("--port", options.port)
    for rule in FRONTEND_RULES:
        if not (elsewhere and rule in LOCAL_RULES):
            rule(options)


def check_gateway(options: GatewayOptions, *, elsewhere: bool = False) -> None:
    check_runtime(options)
    flags.port_is_a_port("--port", options.port)
    for rule in GATEWAY_RULES:
        if not (elsewhere and rule in LOCAL_RULES):
            rule(options)


def check_serve(options: ServeOptions) -> None:
    for rule in SERVE_RULES:
        rule(options)


def check_export(options: ExportOptions) -> None:
    for rule in EXPORT_RULES:
        rule(options)


def check_find(options: FindOptions) -> None:
    check_reach(options)
    for rule in FIND_RULES:
        rule(options)


def check_console_settings(settings: ConsoleSettings, token: str | None) -> None:
    """Check what `serve` says of its console; `token` is that of the workers."""
    for rule in CONSOLE_RULES:
        rule(settings, token)


def check_console(options: ConsoleOptions) -> None:
    check_find(options)
    check_console_settings(options, options.admin_token)


def check_admin(options: AdminOptions) -> None:
    check_find(options)
    for rule in ADMIN_RULES:
        rule(options)


def check_keys(options: DatabaseOptions) -> None:
    """Check the options of `keys` and `usage`."""
    for rule in KEYS_RULES:
        rule(options)


def check_load(options: LoadOptions) -> None:
    for rule in LOAD_RULES:
        rule(options)


def check_plane(options: PlaneOptions) -> None:
    for rule in PLANE_RULES:
        rule(options)


def check_pooling_bench(options: PoolingBenchOptions) -> None:
    for rule in POOLING_RULES:
        rule(options)


def check_routing(options: RoutingOptions) -> None:
    for rule in ROUTING_RULES:
        rule(options)


def check_scale(options: ScaleOptions) -> None:
    for rule in SCALE_RULES:
        rule(options)
