"""Several connectors at once: vLLM's MultiConnector, or KVBM's PdConnector where KVBM comes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.kv.connectors.base import PREFILL_PARAMS, Connector, Place, transfer_params

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Multi:
    """The first part that hands over per request speaks for all."""

    parts: Sequence[Connector]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    def engine_config(self, place: Place) -> dict[str, Any]:
        config: dict[str, Any] = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [part.engine_config(place) for part in self.parts]},
            "kv_load_failure_policy": "recompute",
        }
        if [part.name for part in self.parts] == ["kvbm", "nixl"]:
            config["kv_connector"] = "PdConnector"
            config["kv_connector_module_path"] = "kvbm.vllm_integration.connector"
        return config

    def prefill_params(self) -> dict[str, Any] | None:
        return next((params for part in self.parts if (params := part.prefill_params())), None)

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, Any] | None:
        for part in self.parts:
            if part.prefill_params() is not None:
                return part.decode_params(handed, prompt_tokens, block_size)
        return None


@dataclass(frozen=True, slots=True)
class AsWritten:
    """A connector the user described with --kv-transfer-config: we hand over what it gives, as a dict."""

    name: str

    def engine_config(self, place: Place) -> dict[str, Any]:
        return {}

    def prefill_params(self) -> dict[str, Any]:
        return dict(PREFILL_PARAMS)

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, Any]:
        return transfer_params(handed)
