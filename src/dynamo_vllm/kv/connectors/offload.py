"""Tiers: KV caches that leave an engine go to host memory and to disk, with vLLM's own connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.kv.connectors.base import ConnectorPlace, Needs

CLASS = "TierConnector"
"""vLLM's connector with small changes; our plugin names it to vLLM."""
FROM_HOST_MEMORY = {"kv_load_tiers": [{"medium": "CPU"}]}
"""Parameters of a request that is not to wait for a disk."""
_GB = 10**9


class Offload:
    name = "offload"
    has_plain_blocks = False

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "spec_name": "Tiers",
            "spec_module_path": "dynamo_vllm.engine.tiers.spec",
            "cpu_bytes_to_use": _share(place.offload_gb, place),
            # So that the router finds caches which are in host memory only.
            "self_describing_kv_events": True,
            # Other engines must find the blocks of a cache that is handed over as they expect them.
            "packs_blocks": not place.has_handover,
        }
        if place.disk is not None:
            disk = {
                "type": "DiskTier",
                "module_path": "dynamo_vllm.engine.tiers.disk_tier",
                "folder": str(Path(place.disk.path).expanduser().absolute()),
                "limit_bytes": _share(place.disk.gb, place),
                "identity": place.identity,
            }
            extra["secondary_tiers"] = [disk]
        return {
            "kv_connector": CLASS,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def needs(self, place: ConnectorPlace) -> Needs:
        if place.card.hands_over_kv and not place.has_handover:
            raise ConfigError(
                f"the connector offload alone keeps a {place.role} worker's caches to itself; "
                "give --connector offload nixl"
            )
        return Needs()

    def prefill_params(self) -> None:
        return None

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> None:
        return None


def _share(gb: float, place: ConnectorPlace) -> int:
    """Return the bytes of one engine."""
    return int(gb * _GB) // place.ranks
