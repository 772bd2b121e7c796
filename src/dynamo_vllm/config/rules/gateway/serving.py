"""Rules for the options of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_vllm.config.rules import bounds, frontend
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import GatewayOptions


def gateway_numbers_are_large_enough(o: GatewayOptions) -> None:
    bounds.at_least(o, 1, "max_body_mb", "max_connections", "header_kb", "batch_concurrency")
    bounds.at_least(o, 0, "trusted_proxies", "drain_seconds")
    bounds.above_zero(o, "idle_seconds", "stream_idle_seconds", "responses_days")


def headers_have_a_bound(o: GatewayOptions) -> None:
    if o.header_kb > 8192:
        raise ConfigError(f"--header-kb {o.header_kb} is more than Envoy takes; use 8192 or less")


def keys_are_long_enough(o: GatewayOptions) -> None:
    """A short key can be guessed; one with a space could not be given in the variable."""
    for key in o.api_key:
        if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                "--api-key must have 8 or more printable characters without spaces; "
                "for example the output of: openssl rand -hex 24"
            )


def open_has_no_keys(o: GatewayOptions) -> None:
    if o.open and o.api_key:
        raise ConfigError("--open lets everybody in without a key; leave it out, or --api-key")


def frontends_are_addresses(o: GatewayOptions) -> None:
    for url in o.frontend:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ConfigError(f"--frontend {url} is not an address; use http://HOST:PORT")
    if len({urlsplit(url).scheme for url in o.frontend}) > 1:
        raise ConfigError("--frontend: all addresses must have the same scheme, http or https")


def origins_are_origins(o: GatewayOptions) -> None:
    for origin in o.cors_origin:
        parts = urlsplit(origin)
        if origin != "*" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path):
            raise ConfigError(f"--cors-origin {origin} is not an origin; use https://HOST, or *")


def gateway_tls_needs_both_files(o: GatewayOptions) -> None:
    frontend.tls_needs_both_files(o)


def gateway_certificate_is_there(o: GatewayOptions) -> None:
    frontend.certificate_is_there(o)


def parts_share_a_folder(o: GatewayOptions) -> None:
    if o.part != "all" and o.gateway_dir is None:
        raise ConfigError(f"--part {o.part} needs --gateway-dir, the folder where it finds the other part")


RULES = (
    gateway_numbers_are_large_enough,
    headers_have_a_bound,
    keys_are_long_enough,
    open_has_no_keys,
    frontends_are_addresses,
    origins_are_origins,
    gateway_tls_needs_both_files,
    gateway_certificate_is_there,
    parts_share_a_folder,
)
