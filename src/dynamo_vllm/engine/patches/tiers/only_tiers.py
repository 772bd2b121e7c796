"""Lets a request load its prompt from the tiers although the engine's own cache has it.

What is wrong in vLLM 0.30: a request with `skip_reading_prefix_cache` skips the tiers together with the
engine's own cache. So whether a tier gives back what was stored can be seen only after that cache was
emptied. That is refused while requests run, takes the cache from all clients, and the router then forgets the
tiers too.

What we do: requests that ask for it skip only the engine's own cache. Only the worker itself asks
(`engine/vllm/parts/tiers.py`).

It can go when vLLM has a parameter for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import Where, in_vllm, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

ONLY_TIERS = "dynamo_only_tiers"
"""The field of a request's kv_transfer_params that asks for it, beside vLLM's own parameter."""
_SCHEDULER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


def apply() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    wrap(OffloadingConnectorScheduler, "get_num_new_matched_tokens", _looking_up)


def _looking_up(ask: Callable[..., Any]) -> Callable[..., Any]:
    def get_num_new_matched_tokens(connector: object, request: Request, *more: Any, **named: Any) -> Any:
        params = request.kv_transfer_params
        if not params or not params.get(ONLY_TIERS):
            return ask(connector, request, *more, **named)
        # vLLM has looked into its own cache before this call, and afterwards asks again whether to skip.
        request.skip_reading_prefix_cache = False
        found = ask(connector, request, *more, **named)
        if found[0] is None:  # not known yet: vLLM begins again in a later step
            request.skip_reading_prefix_cache = True
        return found

    return get_num_new_matched_tokens


def still_needed() -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    return "if request.skip_reading_prefix_cache:" in source(
        OffloadingConnectorScheduler.get_num_new_matched_tokens
    )


PATCHES = (
    in_vllm(
        name="only-tiers",
        defect="a request that skips the engine's own prefix cache skips the tiers too",
        targets=(f"{_SCHEDULER}.OffloadingConnectorScheduler.get_num_new_matched_tokens",),
        where=(Where.TIERS,),
        apply=apply,
        still_needed=still_needed,
    ),
)
