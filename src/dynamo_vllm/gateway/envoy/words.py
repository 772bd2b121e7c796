"""Writes the words of Envoy's configuration: typed messages and addresses."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
AUTHZ, CORS = "envoy.filters.http.ext_authz", "envoy.filters.http.cors"
CONNECTION_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


def typed(name: str, kind: str, **values: Any) -> Json:
    return {"name": name, "typed_config": message(kind, **values)}


def message(kind: str, **values: Any) -> Json:
    return {"@type": f"type.googleapis.com/{kind}", **values}


def address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def no_authz() -> Json:
    """For a route that asks for no key."""
    return message("envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute", disabled=True)


def no_filter() -> Json:
    """For a route without this filter: a body that is not looked at is not held back either."""
    return message("envoy.config.route.v3.FilterConfig", disabled=True)
