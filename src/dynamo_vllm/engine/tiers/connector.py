"""vLLM's connector for tiers; a request may also load its prompt from them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from dynamo_vllm.engine.tiers import ONLY_TIERS

if TYPE_CHECKING:
    from vllm.v1.request import Request


class TierConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM has no types
    """Lets a request skip the engine's own cache and no tier; vLLM (0.30 to 0.32) skips all of them.

    So the worker can prove that a tier gives back what was stored, without emptying the engine's cache: that
    is refused while requests run, takes the cache from all clients, and the router then forgets the tiers.
    """

    def get_num_new_matched_tokens(self, request: Request, *more: Any, **named: Any) -> Any:
        params = request.kv_transfer_params
        if not params or not params.get(ONLY_TIERS):
            return super().get_num_new_matched_tokens(request, *more, **named)
        # vLLM has looked into its own cache before this call, and afterwards asks again whether to skip.
        request.skip_reading_prefix_cache = False
        found = super().get_num_new_matched_tokens(request, *more, **named)
        if found[0] is None:  # not known yet: vLLM begins again in a later step
            request.skip_reading_prefix_cache = True
        return found
