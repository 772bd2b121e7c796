"""Makes the scheduler's work for one more token of a running request cheaper. Three patches.

What is wrong: an engine core is one Python thread. With many running requests and a small model, that thread
limits the tokens per second. For most tokens nothing changes in the KV cache: the request's last block still
has room, and no block has become full. vLLM 0.30 to 0.32 finds this out anew for every token, in more than 50
calls:

- Slots: `allocate_slots` looks for blocks to remove, to count, to allocate and to cache.
- Tokens: `_update_request_with_output` looks for blocks to hash and to cache, and for reasons to stop.
- Batches: `schedule` asks for each request whether it is a prompt, has images, drafts or a connector, also in
  a step in which every request only gets its next token.

What we do: first check in one function that there is nothing to do, and otherwise call vLLM's function. In a
step of such requests only, vLLM's `schedule` sees no requests, and we add them to its output. The results and
the state are the same as with vLLM's functions (`tests/contract/test_decode_steps.py` compares them). The
patches are for models with full attention in one KV cache group and prefix caching (`_Slots.of`). All other
engines use vLLM's functions.

They can go one by one when vLLM calls fewer functions for such a token.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo_vllm.engine.patches.patch import Where, in_vllm, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    Updated = tuple[list[int], bool]

FEW_CALLS = 6
"""The patches are needed as long as vLLM calls more Python functions than this for a token."""
_SLOTS = "dynamo_vllm_slots"


class _Slots(NamedTuple):
    """Is what we look up for each token, from the only group of a KV cache."""

    block_size: int
    blocks: dict[str, list[Any]]
    """The blocks of each request that has any."""
    cached: dict[str, int]
    """How many blocks of a request are in the prefix cache."""
    partial_hits: dict[str, Any]
    """The requests whose last block is to be copied before they write to it."""

    @classmethod
    def of(cls, manager: KVCacheManager) -> _Slots | None:
        """Returns None if more than a comparison of lengths decides what a token changes.

        Sliding windows free blocks, hybrid models have several groups, and a drafter's last tokens are cached
        later. The classes must be exactly these, because a subclass may do more. This coordinator's blocks
        have as many tokens as those that are hashed.
        """
        from vllm.v1.core import kv_cache_manager
        from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        coordinator = manager.coordinator
        if type(manager) is not kv_cache_manager.KVCacheManager:
            return None
        if type(coordinator) is not UnitaryKVCacheCoordinator or coordinator.num_reprefillable_tokens:
            return None
        (group,) = coordinator.single_type_managers
        if type(group) is not FullAttentionManager or not group.enable_caching:
            return None
        return cls(group.block_size, group.req_to_blocks, group.num_cached_block, group._partial_hit_reqs)


def _prepare() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    wrap(KVCacheManager, "__init__", _with_slots)


def _with_slots(make: Callable[..., None]) -> Callable[..., None]:
    def init(manager: KVCacheManager, *args: Any, **named: Any) -> None:
        make(manager, *args, **named)
        setattr(manager, _SLOTS, _Slots.of(manager))

    return init


# --- slots ------------------------------------------------------------------------------------------------


def apply_slots() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    _prepare()
    wrap(KVCacheManager, "allocate_slots", _unless_there_is_room)


def _unless_there_is_room(allocate: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.request import RequestStatus

    running = RequestStatus.RUNNING

    def allocate_slots(
        manager: Any,
        request: Any,
        num_new_tokens: int,
        *more: Any,
        num_lookahead_tokens: int = 0,
        **named: Any,
    ) -> KVCacheBlocks | None:
        slots: _Slots | None = manager.dynamo_vllm_slots
        # The scheduler gives no further arguments for running requests.
        if (
            slots is not None
            and request.status is running
            and num_new_tokens > 0
            and not (num_lookahead_tokens or more or named)
        ):
            size, all_blocks, cached, partial_hits = slots
            name = request.request_id
            end = request.num_computed_tokens + num_new_tokens
            blocks = all_blocks.get(name)
            if blocks is not None and end <= len(blocks) * size and not partial_hits:
                known = len(request._all_token_ids)  # the others are placeholders, which vLLM does not cache
                if (known if known < end else end) // size <= cached.get(name, 0):
                    return manager.empty_kv_cache_blocks
        return allocate(
            manager, request, num_new_tokens, *more, num_lookahead_tokens=num_lookahead_tokens, **named
        )

    return allocate_slots


def slots_take_many_calls() -> bool:
    """Counts the calls for a request whose only block has room."""
    manager, request = _manager(), _request()
    manager.allocate_slots(request, 1)
    request.num_computed_tokens += 1
    return _calls(lambda: manager.allocate_slots(request, 1)) > FEW_CALLS


# --- tokens -----------------------------------------------------------------------------------------------


def apply_tokens() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    _prepare()
    wrap(AsyncScheduler, "_update_request_with_output", _one_token)


def _one_token(update: Callable[..., Updated]) -> Callable[..., Updated]:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import RequestStatus

    running = RequestStatus.RUNNING

    def update_request_with_output(
        scheduler: AsyncScheduler, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> Updated:
        manager: Any = scheduler.kv_cache_manager
        slots: _Slots | None = manager.dynamo_vllm_slots
        if (
            slots is None
            or len(new_token_ids) != 1
            or is_stale
            or request.status is not running
            or type(scheduler) is not AsyncScheduler
        ):
            return update(scheduler, request, new_token_ids, is_stale)
        token, tokens, output = new_token_ids[0], request._all_token_ids, request._output_token_ids
        tokens.append(token)
        output.append(token)
        if len(tokens) >= (len(request.block_hashes) + 1) * slots.block_size:
            request.update_block_hashes()
        params = request.sampling_params
        # Only these can be a reason to stop; vLLM's function decides.
        stopped = (
            token == params.eos_token_id
            or params.stop_token_ids
            or len(output) >= request.max_tokens
            or len(tokens) >= scheduler.max_model_len
            or params.repetition_detection is not None
        ) and check_stop(request, scheduler.max_model_len)
        request.num_output_placeholders -= 1
        placeholders = request.num_output_placeholders
        assert placeholders >= 0
        computed = request.num_computed_tokens - placeholders
        if computed // slots.block_size > slots.cached.get(request.request_id, 0):
            manager.cache_blocks(request, computed)
        return new_token_ids, stopped

    return update_request_with_output


def tokens_take_many_calls() -> bool:
    """Counts the calls for a token that neither fills a block nor ends the request."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    manager, request = _manager(), _request()
    manager.allocate_slots(request, 1)
    request.num_computed_tokens = request.num_output_placeholders = 1
    scheduler = object.__new__(AsyncScheduler)
    scheduler.kv_cache_manager, scheduler.max_model_len = manager, _BLOCK
    return _calls(lambda: scheduler._update_request_with_output(request, [1])) > FEW_CALLS


# --- batches ----------------------------------------------------------------------------------------------


def apply_batches() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    _prepare()
    wrap(AsyncScheduler, "schedule", _unless_all_decode)


def _unless_all_decode(schedule: Callable[..., Any]) -> Callable[..., Any]:
    def schedule_step(scheduler: Any, throttle_prefills: bool = False) -> Any:
        decodes = _Decodes.of(scheduler) if _may_all_decode(scheduler) else None
        if decodes is None:
            return schedule(scheduler, throttle_prefills)
        new_blocks = decodes.allocate(scheduler.kv_cache_manager)
        running, scheduler.running = scheduler.running, []
        try:
            output = schedule(scheduler, throttle_prefills)  # also of what has ended since the last step
        finally:
            scheduler.running = running
        decodes.add_to(output, new_blocks)
        decodes.advance(scheduler)
        return output

    return schedule_step


def _may_all_decode(scheduler: Any) -> bool:
    """Returns False if requests wait, or if vLLM asks others what to schedule."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState

    count = len(scheduler.running)
    return (
        0 < count == len(scheduler.requests)
        and count <= scheduler.max_num_scheduled_tokens
        and count <= scheduler.scheduler_config.max_num_batched_tokens
        and type(scheduler) is AsyncScheduler
        and scheduler.kv_cache_manager.dynamo_vllm_slots is not None
        and scheduler.use_v2_model_runner
        and not scheduler.use_pp
        and not scheduler._inflight_prefills
        and scheduler._pause_state is PauseState.UNPAUSED
        and scheduler.vllm_config.speculative_config is None
        and scheduler.num_lookahead_tokens == 0
        and scheduler.num_sampled_tokens_per_step == 1
        and scheduler.connector is None
        and scheduler.ec_connector is None
        and scheduler.aux_output_connector is None
    )


class _Decodes:
    """Collects the requests of a step in which each gets one token. Changes nothing until `allocate`."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.names: list[str] = []
        self.computed: list[int] = []
        self.outputs: list[int] = []
        self.changed: list[int] = []
        """The places of the requests that need a block, or have one to be cached."""

    @classmethod
    def of(cls, scheduler: Any) -> _Decodes | None:
        """Returns None if a request is to do anything else than to decode, or if there are too few blocks."""
        manager = scheduler.kv_cache_manager
        size, all_blocks, cached, partial_hits = manager.dynamo_vllm_slots
        if partial_hits:
            return None
        found = cls()
        requests, names, computed_tokens, outputs = found.requests, found.names, found.computed, found.outputs
        step, last = scheduler.current_step + 1, scheduler.max_model_len - 2
        new_blocks = 0
        for request in scheduler.running:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                continue  # it gets its last token in an earlier step, which has not ended yet
            known = len(request._all_token_ids)
            if (
                known + placeholders - computed != 1
                or computed > last
                or request.spec_token_ids
                or request.mm_features
                or request.structured_output_request is not None
                or request.is_prefill_chunk
                or step < request.next_decode_eligible_step
            ):
                return None
            name, end = request.request_id, computed + 1
            if end > len(all_blocks[name]) * size:
                new_blocks += 1
                found.changed.append(len(names))
            elif (known if known < end else end) // size > cached.get(name, 0):
                found.changed.append(len(names))
            requests.append(request)
            names.append(name)
            computed_tokens.append(computed)
            outputs.append(len(request._output_token_ids) + placeholders)
        if not names or new_blocks > manager.block_pool.get_num_free_blocks():
            return None
        return found

    def allocate(self, manager: Any) -> list[Any]:
        """Returns the ids of each request's new blocks; None if there are none."""
        new_blocks: list[Any] = [None] * len(self.names)
        for place in self.changed:
            blocks = manager.allocate_slots(self.requests[place], 1, num_lookahead_tokens=0)
            new_blocks[place] = blocks.get_block_ids(allow_none=True)
        return new_blocks

    def add_to(self, output: Any, new_blocks: list[Any]) -> None:
        output.num_scheduled_tokens = dict.fromkeys(self.names, 1)
        output.total_num_scheduled_tokens = len(self.names)
        requests = output.scheduled_cached_reqs
        requests.req_ids = self.names
        requests.new_block_ids = new_blocks
        requests.num_computed_tokens = self.computed
        requests.num_output_tokens = self.outputs

    def advance(self, scheduler: Any) -> None:
        """Changes the requests as vLLM does after each step that schedules them."""
        step, no_drafts = scheduler.current_step + 1, scheduler._spec_token_placeholders
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
            request.next_decode_eligible_step = step
            request.spec_token_ids = no_drafts


def batches_take_many_calls() -> bool:
    """Returns whether vLLM asks for each request what we ask only once for a step."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    text = source(AsyncScheduler.schedule)
    each = text[text.index("while req_index < len(self.running)") :]
    return all(
        f"self.{asked}" in each
        for asked in ("_reserve_prefill_lookahead(", "ec_connector", "need_mamba_block_aligned_split")
    )


# --- for the probes ---------------------------------------------------------------------------------------

_BLOCK = 16


def _manager() -> KVCacheManager:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(config, max_model_len=_BLOCK, scheduler_block_size=_BLOCK, hash_block_size=_BLOCK)


def _request() -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    def hashes_of_full_blocks(request: Request) -> list[Any]:
        return []

    request = Request("probe", [1], SamplingParams(max_tokens=9), None, block_hasher=hashes_of_full_blocks)
    request.status = RequestStatus.RUNNING
    return request


def _calls(act: Callable[[], object]) -> int:
    """Counts the Python functions that this calls."""
    seen = SimpleNamespace(calls=0)

    def count(frame: FrameType, event: str, about: object) -> None:
        seen.calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return int(seen.calls)


PATCHES = (
    in_vllm(
        name="decode-slots",
        targets=(
            "vllm.v1.core.kv_cache_manager.KVCacheManager.__init__",
            "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots",
        ),
        defect="for every token the scheduler looks for blocks to free, allocate and cache",
        where=(Where.ENGINE,),
        apply=apply_slots,
        still_needed=slots_take_many_calls,
    ),
    in_vllm(
        name="decode-tokens",
        targets=(
            "vllm.v1.core.kv_cache_manager.KVCacheManager.__init__",
            "vllm.v1.core.sched.async_scheduler.AsyncScheduler._update_request_with_output",
        ),
        defect="for every token the scheduler looks for blocks to hash and cache, and for a reason to stop",
        where=(Where.ENGINE,),
        apply=apply_tokens,
        still_needed=tokens_take_many_calls,
    ),
    in_vllm(
        name="decode-batches",
        versions=">=0.32,<0.33",  # older ones also count the blocks that all requests share
        targets=(
            "vllm.v1.core.kv_cache_manager.KVCacheManager.__init__",
            "vllm.v1.core.sched.async_scheduler.AsyncScheduler.schedule",
        ),
        defect="a step of decodes asks for each request what only prompts, images and drafts need",
        where=(Where.ENGINE,),
        apply=apply_batches,
        still_needed=batches_take_many_calls,
    ),
)
