"""Several connectors at once: one keeps KV caches that leave the engine, NIXL transfers them to
decode workers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.kv.connectors import kvbm, offload
from dynamo_vllm.kv.connectors.base import PREFILL_PARAMS, Connector, ConnectorPlace, Needs, transfer_params

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Multi:
    """The first part with parameters per request decides for all."""

    parts: Sequence[Connector]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def has_plain_blocks(self) -> bool:
        return any(part.has_plain_blocks for part in self.parts)

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        place = self._place(place)
        parts = [part.engine_config(place) for part in self._at(place)]
        if len(parts) == 1:
            return parts[0]
        config: dict[str, Any] = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": parts},
            "kv_load_failure_policy": "recompute",
        }
        if any(part.name == "kvbm" for part in self.parts):
            # KVBM's own pair: it looks a prompt up in its tiers and lets NIXL transfer the blocks.
            config["kv_connector"] = "PdConnector"
            config["kv_connector_module_path"] = kvbm.MODULE
        return config

    def needs(self, place: ConnectorPlace) -> Needs:
        place = self._place(place)
        found = Needs()
        for part in self._at(place):
            found = found.and_those(part.needs(place))
        return found

    def prefill_params(self) -> dict[str, object] | None:
        speaker = self._hands_over()
        return speaker.prefill_params() if speaker else None

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, object] | None:
        speaker = self._hands_over()
        found = speaker.decode_params(handed, prompt_tokens, block_size) if speaker else None
        # vLLM asks each connector for the prompt, also those whose answer it does not need, and waits for it.
        return {**found, **offload.FROM_HOST_MEMORY} if found and self._has_tiers else found

    def _place(self, place: ConnectorPlace) -> ConnectorPlace:
        return dataclasses.replace(place, has_handover=self._hands_over() is not None)

    @property
    def _has_tiers(self) -> bool:
        return any(part.name == offload.Offload.name for part in self.parts)

    def _hands_over(self) -> Connector | None:
        return next((part for part in self.parts if part.prefill_params() is not None), None)

    def _at(self, place: ConnectorPlace) -> list[Connector]:
        """Return the parts that work there, in vLLM's order.

        vLLM loads a prompt from the first connector that has some of it, and only from that one. So our tiers
        come after NIXL, whose cache is the whole prompt: on a prefill worker NIXL has none, and a decode
        worker loads from its tiers what it computes itself. Other stores cannot come second: they come first,
        and a decode worker has none.
        """
        speaker = self._hands_over()
        if speaker is None:
            return list(self.parts)
        stores = [part for part in self.parts if part is not speaker]
        if self._has_tiers:
            return [speaker, *stores]
        return [speaker] if place.card.takes_kv else [*stores, speaker]


@dataclass(frozen=True, slots=True)
class AsWritten:
    """A connector that the user described with --kv-transfer-config: we pass on its parameters, as a dict."""

    name: str
    known: Sequence[Connector] = ()
    """Our own connectors that the description names."""

    @property
    def has_plain_blocks(self) -> bool:
        return any(part.has_plain_blocks for part in self.known)

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        return {}

    def needs(self, place: ConnectorPlace) -> Needs:
        place = dataclasses.replace(place, has_handover=True)  # the user knows how the parts work together
        found = Needs()
        for part in self.known:
            found = found.and_those(part.needs(place))
        return found

    def prefill_params(self) -> dict[str, object]:
        return dict(PREFILL_PARAMS)

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, object]:
        for part in self.known:
            if part.prefill_params() is not None:  # checked like our own
                return part.decode_params(handed, prompt_tokens, block_size) or {}
        return transfer_params(handed)
