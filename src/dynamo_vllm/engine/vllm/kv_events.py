"""Finds the ZMQ address of each rank's KV events, and relays those of ranks on other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config.engine_rules import connect_address
from dynamo_vllm.engine.process.kv_event_relay import EventRelay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.names import Config


def addresses(config: Config, ranks: Iterable[int], host: str = "127.0.0.1") -> tuple[dict[int, str], str]:
    """Returns the address of each rank's events on `host`, and their topic."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return {}, ""
    from vllm.distributed.kv_events import ZmqEventPublisher

    if merged := _merged(config):
        return {next(iter(ranks)): merged}, ""
    endpoints = {}
    for rank in ranks:
        bound = ZmqEventPublisher.offset_endpoint_port(events.endpoint, rank)
        endpoints[rank] = connect_address(bound, host)
    return endpoints, events.topic


def _merged(config: Config) -> str | None:
    """Returns where a connector publishes vLLM's events together with its own, if it does."""
    more = config.additional_config
    merged = more.get("consolidator_endpoints") if isinstance(more, dict) else None
    return str(merged[2]) if merged else None


def relay(config: Config, settings: EngineSettings) -> EventRelay | None:
    """Starts a relay for ranks on other nodes, which connect to this one; None if there are none."""
    if _merged(config):
        return None
    listen, _ = addresses(config, settings.node.remote_ranks, settings.node.leader)
    return EventRelay(listen, settings.scratch_folder) if listen else None
