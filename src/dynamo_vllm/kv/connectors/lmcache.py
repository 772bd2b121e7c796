"""LMCache: KV caches go to host memory, disk or a remote store, and are found again by content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.kv.connectors.base import ConnectorPlace, Needs, unset

_REMOTE = ("LMCACHE_REMOTE_URL", "LMCACHE_ENABLE_PD", "LMCACHE_ENABLE_P2P")


class Lmcache:
    name = "lmcache"
    has_plain_blocks = True

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}

    def needs(self, place: ConnectorPlace) -> Needs:
        if place.device == "cpu":
            # It starts, logs "No supported cpu connector found", and every request waits 3 s for an answer.
            raise ConfigError("the connector lmcache: LMCache 0.5.6 cannot serve a CPU engine; leave it out")
        file = _config_file(place)
        if place.card.hands_over_kv and not place.has_handover and not _is_shared(place, file):
            raise ConfigError(
                f"the connector lmcache alone keeps a {place.role} worker's caches to itself; "
                "give --connector lmcache nixl, or set LMCACHE_REMOTE_URL to a store both reach"
            )
        wanted = {"LMCACHE_TRACK_USAGE": "false"}
        if "pre_caching_hash_algorithm" not in file:
            # Python's own hash, LMCache's default, differs between the scheduler's process and the GPU's.
            wanted["LMCACHE_PRE_CACHING_HASH_ALGORITHM"] = "sha256_cbor"
        if "max_local_cpu_size" not in file:
            wanted["LMCACHE_MAX_LOCAL_CPU_SIZE"] = f"{place.offload_gb:g}"
        return Needs(environment=unset(wanted, place), shares_metrics=True)

    def prefill_params(self) -> None:
        return None

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> None:
        return None


def _config_file(place: ConnectorPlace) -> dict[str, object]:
    """LMCache's own file, if the user named one; variables override it."""
    path = place.environment.get("LMCACHE_CONFIG_FILE")
    if not path:
        return {}
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"LMCACHE_CONFIG_FILE={path}: {exc}; name a readable YAML file") from None
    return found if isinstance(found, dict) else {}


def _is_shared(place: ConnectorPlace, file: dict[str, object]) -> bool:
    return any(
        place.environment.get(name) or file.get(name.removeprefix("LMCACHE_").lower()) for name in _REMOTE
    )
