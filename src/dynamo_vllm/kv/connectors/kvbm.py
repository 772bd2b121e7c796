"""KVBM, the runtime's block manager: KV blocks go to pinned host memory and disk."""

from __future__ import annotations

from typing import Any

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.kv.connectors.base import ConnectorPlace, Needs, unset

MODULE = "kvbm.vllm_integration.connector"
_TIERS = (
    "DYN_KVBM_CPU_CACHE_GB",
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS",
    "DYN_KVBM_DISK_CACHE_GB",
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS",
)
_LEADER_PORT = "DYN_KVBM_LEADER_ZMQ_PUB_PORT"
_CONSOLIDATOR = "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR"
_METRICS, _METRICS_PORT = "DYN_KVBM_METRICS", "DYN_KVBM_METRICS_PORT"


class Kvbm:
    name = "kvbm"
    has_plain_blocks = True

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        return {
            "kv_connector": "DynamoConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
        }

    def needs(self, place: ConnectorPlace) -> Needs:
        if place.device == "cpu":
            raise ConfigError("the connector kvbm moves caches from and to a GPU; leave it out on CPU")
        if place.card.hands_over_kv and not place.has_handover:
            raise ConfigError(
                f"the connector kvbm alone keeps a {place.role} worker's caches to itself; "
                "give --connector kvbm nixl"
            )
        pub, ack, metrics, events = _ports(place, 4)
        wanted = {
            **_tier(place),
            # Its ports are fixed by default, so a second worker on the machine could not have them.
            _LEADER_PORT: pub,
            "DYN_KVBM_LEADER_ZMQ_ACK_PORT": ack,
            # vLLM sets it before it loads NIXL; KVBM loads NIXL first.
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
        url = None
        if _is_on(place, _METRICS, "false"):
            wanted[_METRICS_PORT] = metrics
            url = f"http://127.0.0.1:{place.environment.get(_METRICS_PORT, metrics)}/metrics"
        return Needs(
            environment=unset(wanted, place), metrics_url=url, merged_events=_merged_events(place, events)
        )

    def prefill_params(self) -> None:
        return None

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> None:
        return None


def _tier(place: ConnectorPlace) -> dict[str, str]:
    """Add a tier in host memory, unless the user sized one; KVBM 1.6 ends the engine without any."""
    sizes = {name: place.environment[name] for name in _TIERS if place.environment.get(name)}
    for name, text in sizes.items():
        if not _is_size(text):
            raise ConfigError(f"{name}={text!r} is not a size; use a number above 0, or unset it")
    return {} if sizes else {"DYN_KVBM_CPU_CACHE_GB": f"{place.offload_gb:g}"}


def _is_size(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _is_on(place: ConnectorPlace, name: str, default: str) -> bool:
    return place.environment.get(name, default).strip().lower() in ("1", "true", "on", "yes")


def _ports(place: ConnectorPlace, count: int) -> list[str]:
    """Return free ports, all different."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[str(place.find_port())] = None
    return list(found)


def _merged_events(place: ConnectorPlace, port: str) -> str | None:
    """KVBM merges vLLM's events with its own: for the router a block that it moved is still cached."""
    if not _is_on(place, _CONSOLIDATOR, "true"):
        return None
    # The address is part of the key of vLLM's compile cache: a fixed port keeps that cache.
    fixed = place.environment.get(_LEADER_PORT)
    if fixed is None:
        return f"tcp://127.0.0.1:{port}"
    if not fixed.isdecimal() or not 0 < int(fixed) <= 64535:
        raise ConfigError(f"{_LEADER_PORT}={fixed!r} is not a port; use 1 to 64535, it needs port + 1000 too")
    return f"tcp://127.0.0.1:{int(fixed) + 1000}"
