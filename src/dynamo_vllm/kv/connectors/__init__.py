"""The table of connectors. A new one is a file in this folder and a line here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dynamo_vllm.kv.connectors.base import ConnectorPlace
from dynamo_vllm.kv.connectors.kvbm import Kvbm
from dynamo_vllm.kv.connectors.lmcache import Lmcache
from dynamo_vllm.kv.connectors.multi import AsWritten, Multi
from dynamo_vllm.kv.connectors.nixl import Nixl
from dynamo_vllm.kv.connectors.offload import Offload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.kv.connectors.base import Connector

CONNECTORS: dict[str, Connector] = {
    "nixl": Nixl(),
    "offload": Offload(),
    "lmcache": Lmcache(),
    "kvbm": Kvbm(),
}


def choose(names: Sequence[str], written: str | None = None) -> Connector | None:
    """Return the connector of --connector NAME…, or of the user's --kv-transfer-config."""
    if written is not None:
        return _written(written)
    parts = [CONNECTORS[name] for name in names if name not in ("none", "null")]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else Multi(parts)


def _written(text: str) -> Connector:
    config: Any = json.loads(text)
    parts = config.get("kv_connector_extra_config", {}).get("connectors", [config])
    classes = {part.get("kv_connector") for part in parts}
    anywhere = ConnectorPlace(role="agg", device="cuda")
    known = [c for c in CONNECTORS.values() if c.engine_config(anywhere)["kv_connector"] in classes]
    return AsWritten(str(config.get("kv_connector", "unnamed")), known)
