"""The table of connectors. A new one is a file beside this and a line here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dynamo_vllm.kv.connectors.multi import AsWritten, Multi
from dynamo_vllm.kv.connectors.nixl import Nixl
from dynamo_vllm.kv.connectors.shared import KVBM, LMCACHE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.kv.connectors.base import Connector

CONNECTORS: dict[str, Connector] = {"nixl": Nixl(), "lmcache": LMCACHE, "kvbm": KVBM}


def choose(names: Sequence[str], written: str | None = None) -> Connector | None:
    """The connector of --connector NAME…, or of a --kv-transfer-config as the user wrote it."""
    if written is not None:
        return _written(written)
    parts = [CONNECTORS[name] for name in names if name not in ("none", "null")]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else Multi(parts)


def _written(text: str) -> Connector:
    """NIXL is checked like our own even when the user wrote its configuration."""
    config: Any = json.loads(text)
    parts = config.get("kv_connector_extra_config", {}).get("connectors", [config])
    if any(part.get("kv_connector") == "NixlConnector" for part in parts):
        return Nixl()
    return AsWritten(str(config.get("kv_connector", "unnamed")))
