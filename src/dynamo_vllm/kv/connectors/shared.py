"""Connectors that share a store instead of handing over per request: LMCache and KVBM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_vllm.kv.connectors.base import Place


@dataclass(frozen=True, slots=True)
class SharedStore:
    """Both engines look a prompt up by its content; a job carries nothing."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)

    def engine_config(self, place: Place) -> dict[str, Any]:
        return {**self.config, "kv_role": "kv_both"}

    def prefill_params(self) -> None:
        return None

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> None:
        return None


LMCACHE = SharedStore("lmcache", {"kv_connector": "LMCacheConnectorV1"})
KVBM = SharedStore(
    "kvbm",
    {"kv_connector": "DynamoConnector", "kv_connector_module_path": "kvbm.vllm_integration.connector"},
)
