"""Writes Envoy's configuration. Pure: settings in, a document out.

The way of a request: headers that only a gateway may set are removed; the control app looks at the key,
before anything of the body is read; where a JSON body names a model, the control app is asked again, with the
body; then the frontend or the control app gets the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.envoy import clusters, console, logs
from dynamo_vllm.gateway.envoy.routes import CHOICE, CONTROL, FRONTEND, ROUTES, Route
from dynamo_vllm.gateway.envoy.words import (
    AUTHZ,
    CONNECTION_MANAGER,
    CORS,
    Json,
    address,
    message,
    no_authz,
    typed,
)

if TYPE_CHECKING:
    from dynamo_vllm.gateway.envoy.settings import EnvoySettings

KEY_PATH, BODY_PATH = "/check/key", "/check/body"
"""Prefixes of the paths with which Envoy asks the control app."""
DECLARED = "x-gateway-declared-bytes"
"""The body's length as the client names it; Envoy's question has a length of its own."""
ONLY_OURS = ("x-dynamo-", "x-gateway-")
"""Prefixes of headers that no client may send."""
ONLY_OURS_EXACT = (
    "x-tenant-id",
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-prefill-dp-rank",
    "x-data-parallel-rank",
    "x-dp-rank",
    "x-frontend-send-ts-ns",
)
CREDENTIALS = ("authorization", "x-api-key", "cookie", "proxy-authorization")
"""Never reach the frontend."""
EXPOSED = (
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{what}-{of}"
        for of in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)
"""Headers of an answer that a web page may read."""
BEFORE_BODY = (
    *("authorization", "x-api-key", "content-type", "origin", "sec-fetch-site"),
    DECLARED,
)
"""Headers from which the control app decides before a body is read; Host is passed always."""
HEAP = "envoy.resource_monitors.fixed_heap"
SHRINK_FROM, REFUSE_FROM, RESET_FROM, RESET_ALL = 0.5, 0.85, 0.88, 0.98
"""Parts of `EnvoySettings.heap_bytes`."""
CONTROL_SECONDS = 75
"""More than a request may wait there for its turn."""
RETRIES = 8
"""Of a question to the control app that cannot be reached: it may be starting again. Pauses double."""


def document(s: EnvoySettings) -> Json:
    """Return the bootstrap document."""
    listeners = [_public(s)]
    if s.status_port is not None:
        listeners.append(_status(s))
    return {
        "admin": {"address": {"pipe": {"path": s.admin_socket, "mode": 0o600}}},
        "static_resources": {
            "listeners": listeners,
            "clusters": clusters.every(s),
        },
        "overload_manager": _overload(s),
        # A client that resets streams as fast as it opens them is cut off.
        "layered_runtime": {
            "layers": [
                {
                    "name": "static",
                    "static_layer": {
                        "overload.premature_reset_total_stream_count": 500,
                        "re2.max_program_size.error_level": 1000,
                    },
                }
            ]
        },
    }


def _overload(s: EnvoySettings) -> Json:
    """Bound the memory of all clients together; `PendingBodies` bounds that of one tenant before."""

    def action(name: str, trigger: Json) -> Json:
        return {"name": f"envoy.overload_actions.{name}", "triggers": [{"name": HEAP, **trigger}]}

    resets = {"scaled": {"scaling_threshold": RESET_FROM, "saturation_threshold": RESET_ALL}}
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": [
            typed(
                "envoy.resource_monitors.global_downstream_max_connections",
                "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                max_active_downstream_connections=s.max_connections,
            ),
            typed(
                HEAP,
                "envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                max_heap_size_bytes=s.heap_bytes,
            ),
        ],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},
        "actions": [
            action("shrink_heap", {"threshold": {"value": SHRINK_FROM}}),
            action("stop_accepting_requests", {"threshold": {"value": REFUSE_FROM}}),
            action("reset_high_memory_stream", resets),  # of HTTP/2 alone, as Envoy 1.40 has it
        ],
    }


# --- listeners ------------------------------------------------------------------------------------------


def _public(s: EnvoySettings) -> Json:
    chain: Json = {
        "filters": [typed("envoy.filters.network.http_connection_manager", CONNECTION_MANAGER, **_manager(s))]
    }
    if s.tls_cert_path is not None:
        chain["transport_socket"] = typed(
            "envoy.transport_sockets.tls",
            "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            common_tls_context={
                "alpn_protocols": ["h2", "http/1.1"],
                "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
                "tls_certificates": [
                    {
                        "certificate_chain": {"filename": s.tls_cert_path},
                        "private_key": {"filename": s.tls_key_path},
                    }
                ],
            },
        )
    return {
        "name": "public",
        "address": address(s.host, s.port),
        "per_connection_buffer_limit_bytes": clusters.CONNECTION_BYTES,
        "filter_chains": [chain],
    }


def _manager(s: EnvoySettings) -> Json:
    found: Json = {
        "stat_prefix": "public",
        "codec_type": "AUTO",
        "server_name": "dynamo-vllm",
        "use_remote_address": True,
        "generate_request_id": False,
        "xff_num_trusted_hops": s.trusted_proxies,
        "skip_xff_append": False,
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "max_request_headers_kb": s.header_kb,
        "common_http_protocol_options": {
            "idle_timeout": f"{s.idle_seconds}s",
            # Some agents send one (session_id); the frontend must not take it for one with dashes.
            "headers_with_underscores_action": "DROP_HEADER",
            "max_headers_count": 100,
        },
        "http2_protocol_options": {
            "max_concurrent_streams": 1000,
            "initial_stream_window_size": 256 << 10,
            "initial_connection_window_size": 1 << 20,
        },
        "request_headers_timeout": "15s",
        "stream_idle_timeout": f"{s.stream_idle_seconds}s",
        "request_timeout": f"{s.body_seconds}s",
        "local_reply_config": logs.own_errors(),
        "route_config": {"name": "routes", "virtual_hosts": [_virtual_host(s)]},
        "http_filters": _filters(s),
        "upgrade_configs": [{"upgrade_type": "websocket", "enabled": False}],
    }
    found["access_log"] = [
        *([logs.ended_log(s.ended_pipe)] if s.ended_pipe is not None else []),
        *([logs.access_log(s.access_log)] if s.access_log is not None else []),
    ]
    return found


def _status(s: EnvoySettings) -> Json:
    """For probes and Prometheus; nothing of Envoy's own admin server can be reached but its metrics."""
    routes = [
        {"match": {"path": "/live"}, "direct_response": {"status": 200}},
        {
            "match": {"path": "/metrics"},
            "route": {"cluster": "admin", "prefix_rewrite": "/stats/prometheus?usedonly"},
        },
    ]
    manager: Json = {
        "stat_prefix": "status",
        "route_config": {"virtual_hosts": [{"name": "status", "domains": ["*"], "routes": routes}]},
        "http_filters": [_router()],
    }
    assert s.status_port is not None
    return {
        "name": "status",
        "ignore_global_conn_limit": True,
        "bypass_overload_manager": True,  # a probe must not end an Envoy that has much to do
        "address": address(s.status_host or "127.0.0.1", s.status_port),
        "filter_chains": [
            {
                "filters": [
                    typed("envoy.filters.network.http_connection_manager", CONNECTION_MANAGER, **manager)
                ]
            }
        ],
    }


# --- routes ---------------------------------------------------------------------------------------------


def _virtual_host(s: EnvoySettings) -> Json:
    found: Json = {
        "name": "all",
        "domains": ["*"],
        "routes": [
            *(console.routes(s) if s.console_socket is not None else ()),
            *(_route(route) for route in ROUTES),
        ],
    }
    if s.cors_origins:
        found["typed_per_filter_config"] = {CORS: _cors(s.cors_origins)}
    return found


def _route(route: Route) -> Json:
    match: Json = {"prefix": route.path} if route.below else {"path": route.path}
    if route.choice:
        value = {"string_match": {"exact": route.choice}}
        match["dynamic_metadata"] = [{"filter": AUTHZ, "path": [{"key": CHOICE}], "value": value}]
    action: Json = {"cluster": route.to, "timeout": "0s"}
    if route.is_socket:
        action["upgrade_configs"] = [{"upgrade_type": "websocket", "enabled": True}]
    if route.to == FRONTEND:
        # A connection that the frontend has just closed, or a frontend that leaves: nothing was begun.
        action["retry_policy"] = {
            "retry_on": "connect-failure,refused-stream,reset-before-request",
            "num_retries": 3,
        }
    found: Json = {
        "match": match,
        "route": action,
        "request_headers_to_remove": [*CREDENTIALS],
        "typed_per_filter_config": {},
    }
    if route.to == CONTROL:  # the frontend names the request itself
        name = {"key": identity.REQUEST, "value": f"%REQ({identity.REQUEST})%"}
        found["response_headers_to_add"] = [{"header": name, "append_action": "ADD_IF_ABSENT"}]
    if route.is_public:
        found["typed_per_filter_config"] |= {AUTHZ: no_authz()}
    if not route.reads_body:
        found["typed_per_filter_config"] |= {f"{AUTHZ}.body": no_authz()}
    if not found["typed_per_filter_config"]:
        del found["typed_per_filter_config"]
    return found


def _cors(origins: tuple[str, ...]) -> Json:
    matches = [{"safe_regex": {"regex": ".*"}} if origin == "*" else {"exact": origin} for origin in origins]
    return message(
        "envoy.extensions.filters.http.cors.v3.CorsPolicy",
        allow_origin_string_match=matches,
        allow_methods="GET, POST, DELETE, OPTIONS",
        allow_headers="*, authorization, content-type, x-api-key, anthropic-version, anthropic-beta",
        expose_headers=", ".join(EXPOSED),
        max_age="86400",
    )


# --- filters --------------------------------------------------------------------------------------------


def _filters(s: EnvoySettings) -> list[Json]:
    return [
        typed(CORS, "envoy.extensions.filters.http.cors.v3.Cors"),
        _mutation("strip", _strip()),
        _ask_control(AUTHZ, KEY_PATH, BEFORE_BODY),
        _ask_control(
            f"{AUTHZ}.body", BODY_PATH, ("x-gateway-", identity.REQUEST), body_bytes=s.max_body_bytes
        ),
        _mutation("hide", [{"remove": name} for name in (DECLARED, CHOICE, identity.MODEL)]),
        _router(),
    ]


def _strip() -> list[Json]:
    by_prefix = [{"remove_on_match": {"key_matcher": {"prefix": p, "ignore_case": True}}} for p in ONLY_OURS]
    declared = _set(DECLARED, "%REQ(content-length)%")
    return [*by_prefix, *({"remove": name} for name in ONLY_OURS_EXACT), declared]


def _ask_control(name: str, path: str, headers: tuple[str, ...], *, body_bytes: int | None = None) -> Json:
    """Ask the control app; what it answers is added to the request, or is the answer to the client."""
    ours = (identity.REQUEST, *identity.FOR_FRONTEND)
    upstream = [{"prefix": "x-gateway-"}, *({"exact": header} for header in ours)]
    more: Json = {}
    if body_bytes is not None:
        more["with_request_body"] = {"max_request_bytes": body_bytes, "allow_partial_message": False}
    return typed(
        name,
        "envoy.extensions.filters.http.ext_authz.v3.ExtAuthz",
        stat_prefix=path.rpartition("/")[2],
        failure_mode_allow=False,
        clear_route_cache=True,
        status_on_error={"code": "ServiceUnavailable"},
        allowed_headers={
            "patterns": [{"prefix" if header.endswith("-") else "exact": header} for header in headers]
        },
        http_service={
            "server_uri": {"uri": "http://control", "cluster": CONTROL, "timeout": f"{CONTROL_SECONDS}s"},
            "path_prefix": path,
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset",
                "num_retries": RETRIES,
                # Envoy takes the longest pause for the time of one try too.
                "retry_back_off": {"base_interval": "0.05s", "max_interval": f"{CONTROL_SECONDS}s"},
            },
            "authorization_response": {
                "allowed_upstream_headers": {"patterns": upstream},
                "allowed_client_headers": {
                    "patterns": [
                        {"exact": "content-type"},
                        {"exact": "www-authenticate"},
                        {"exact": "retry-after"},
                        {"prefix": "x-ratelimit-"},
                    ]
                },
                "allowed_client_headers_on_success": {"patterns": [{"prefix": "x-ratelimit-"}]},
                "dynamic_metadata_from_headers": {
                    "patterns": [{"exact": name} for name in (identity.MODEL, CHOICE)]
                },
            },
        },
        **more,
    )


def _set(header: str, value: str) -> Json:
    return {
        "append": {"header": {"key": header, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    }


def _mutation(name: str, mutations: list[Json]) -> Json:
    return typed(
        f"dynamo_vllm.{name}",
        "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
        mutations={"request_mutations": mutations},
    )


def _router() -> Json:
    return typed(
        "envoy.filters.http.router",
        "envoy.extensions.filters.http.router.v3.Router",
        suppress_envoy_headers=True,
    )
