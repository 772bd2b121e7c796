"""vLLM's connector for tiers, with two changes: how a block lies in memory, and what a request may skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from dynamo_vllm.engine.tiers import ONLY_TIERS

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from dynamo_vllm.engine.vllm.names import Config

PACKS_BLOCKS = "packs_blocks"
"""The setting that lets the layers of a block lie together. Another connector beside this one may need them
apart."""
_PACKED = "BLHNC"


class TierConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM has no types
    """Copies a block of all layers in one piece, where the model has layers of one kind only.

    vLLM asks for a piece of each layer: the 32 of an 8B model are 64 KB each, and an H200 then copies them at
    two thirds of what its link gives; whole blocks at 96 %.
    """

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Config) -> str | None:
        transfer = vllm_config.kv_transfer_config
        may_pack = transfer is not None and transfer.kv_connector_extra_config.get(PACKS_BLOCKS)
        if may_pack and current_platform.is_cuda() and _has_one_kind_of_layer(vllm_config):
            return _PACKED
        found: str | None = super().get_required_kvcache_layout(vllm_config)
        return found

    def get_num_new_matched_tokens(self, request: Request, *more: Any, **named: Any) -> Any:
        """A request that skips the engine's own cache skips the tiers too (vLLM 0.30 to 0.32)."""
        params = request.kv_transfer_params
        if not params or not params.get(ONLY_TIERS):
            return super().get_num_new_matched_tokens(request, *more, **named)
        # vLLM has looked into its own cache before this call, and afterwards asks again whether to skip.
        request.skip_reading_prefix_cache = False
        found = super().get_num_new_matched_tokens(request, *more, **named)
        if found[0] is None:  # not known yet: vLLM begins again in a later step
            request.skip_reading_prefix_cache = True
        return found


def _has_one_kind_of_layer(config: Config) -> bool:
    """Returns whether all layers keep keys and values of the whole prompt, each alike."""
    model, text = config.model_config, config.model_config.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return (
        not (model.use_mla or model.is_hybrid)
        and kinds <= {"full_attention"}
        and model.get_sliding_window() is None
        and config.cache_config.cache_dtype == "auto"
        and config.speculative_config is None
    )
