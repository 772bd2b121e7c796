"""Tests that vLLM's scheduler does the same with our faster decode steps as without them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RepetitionDetectionParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dynamo_vllm.engine.patches import decode_steps
from dynamo_vllm.engine.patches.patch import State
from dynamo_vllm.models.tiny import make_tiny_model

BLOCK, MAX_MODEL_LEN, END_TOKEN, STOP_TOKEN = 4, 48, 3, 4
TOKENS = [END_TOKEN, STOP_TOKEN, *range(10, 25), *[10] * 15]
ORIGINALS = {
    (KVCacheManager, "__init__"): KVCacheManager.__init__,
    (KVCacheManager, "allocate_slots"): KVCacheManager.allocate_slots,
    (AsyncScheduler, "_update_request_with_output"): AsyncScheduler._update_request_with_output,
    (AsyncScheduler, "schedule"): AsyncScheduler.schedule,
}
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = str(make_tiny_model(tmp_path_factory.mktemp("m") / "tiny"))
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enforce_eager=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    return args.create_engine_config()


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that applies these patches, or all for this version of vLLM, until the test ends."""
    for (owner, name), original in ORIGINALS.items():
        monkeypatch.setattr(owner, name, original)

    def apply(*names: str) -> None:
        for patch in decode_steps.PATCHES:
            if patch.name in names and patch.state() is not State.APPLIED:
                pytest.skip(f"{patch.name}: {patch.state()}")
            if patch.name in names or (not names and patch.state() is State.APPLIED):
                patch.apply()

    return apply


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Describes requests that arrive at random, and an engine for them."""

    seed: int
    block: int = BLOCK
    blocks: int = 64
    batched_tokens: int = 24
    max_requests: int = 8
    policy: str = "fcfs"
    batches: int = 2
    """How many steps the engine schedules before it reads the first one's tokens."""
    scheduler: Any = AsyncScheduler
    spec: Any = FullAttentionSpec
    groups: int = 1
    caching: bool = True
    lookahead: int = 0
    newer_runner: bool = True


class Publisher:
    """Collects the KV events instead of sending them."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events.extend(batch.events)


def make_scheduler(config: Any, load: Load) -> Any:
    config = copy.deepcopy(config)
    settings = config.scheduler_config
    settings.async_scheduling = load.scheduler is AsyncScheduler
    settings.max_num_batched_tokens = load.batched_tokens
    settings.max_num_seqs = load.max_requests
    settings.policy = load.policy
    config.cache_config.enable_prefix_caching = load.caching
    config.cache_config.num_gpu_blocks = load.blocks
    more = {"sliding_window": 2 * load.block} if load.spec is SlidingWindowSpec else {}
    specs = [load.spec(block_size=load.block, num_kv_heads=1, head_size=1, dtype=torch.float32, **more)]
    if load.groups == 2:
        specs.append(
            FullAttentionSpec(block_size=load.block, num_kv_heads=1, head_size=1, dtype=torch.float32)
        )
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    scheduler: Any = load.scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=load.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=load.block,
        hash_block_size=load.block,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = load.newer_runner
    scheduler.num_lookahead_tokens = load.lookahead
    scheduler.kv_event_publisher = Publisher()
    return scheduler


def make_request(rng: random.Random, number: int, load: Load) -> Request:
    """Makes a request; many share their first blocks, and stop for different reasons."""
    shared = random.Random(rng.randrange(3))
    length = rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, rng.randrange(1, 30)])
    prompt = [shared.randrange(10, 15) for _ in range(min(length, rng.randrange(20)))]
    prompt += [rng.randrange(10, 15) for _ in range(length - len(prompt))]
    params = SamplingParams(
        max_tokens=rng.choice([1, 2, BLOCK, 9, 30, 60]),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.choice([None, [STOP_TOKEN]]),
        repetition_detection=rng.choice(
            [None, None, RepetitionDetectionParams(max_pattern_size=1, min_count=3)]
        ),
    )
    params._eos_token_id = rng.choice([None, END_TOKEN])
    return Request(
        f"request {number}",
        prompt,
        params,
        None,
        arrival_time=float(number),
        priority=rng.randrange(3) if load.policy == "priority" else 0,
        cache_salt=rng.choice([None, None, "salt"]),
        block_hasher=get_request_block_hasher(BLOCK, HASH) if load.caching else None,
    )


def run(config: Any, load: Load, requests: int = 30) -> list[Any]:
    """Runs an engine without a model until all requests have ended; returns all that could be seen of it."""
    scheduler = make_scheduler(config, load)
    manager, rng = scheduler.kv_cache_manager, random.Random(load.seed)
    seen: list[Any] = []
    made: list[Request] = []
    scheduled: collections.deque[Any] = collections.deque()
    for _ in range(5000):
        if len(made) == requests and not scheduler.has_requests() and not scheduled:
            assert all(request.is_finished() for request in made)
            seen.append(plain(scheduler.kv_event_publisher.events))
            return seen
        for _ in range(rng.randrange(10) if rng.random() < 0.1 else 0):
            if len(made) < requests:
                made.append(make_request(rng, len(made), load))
                scheduler.add_request(made[-1])
        if made and rng.random() < 0.02:
            scheduler.finish_requests(rng.choice(made).request_id, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        if scheduler.has_requests():
            output = scheduler.schedule(rng.random() < 0.1)
            seen.append(plain(output))
            scheduled.append((output, sampled(scheduler, output, rng)))
        if scheduled and (len(scheduled) >= load.batches or not scheduler.has_requests()):
            outputs = scheduler.update_from_output(*scheduled.popleft())
            seen.append([plain(about.outputs) for about in outputs.values()])
        seen.append([state(scheduler, request) for request in scheduler.requests.values()])
        seen.append((manager.block_pool.get_num_free_blocks(), scheduler.prefill_capacity_bound))
    raise AssertionError("the requests do not end")


def sampled(scheduler: Any, output: Any, rng: random.Random) -> ModelRunnerOutput:
    names = list(output.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[name].is_prefill_chunk else [rng.choice(TOKENS)] for name in names]
    places = {name: number for number, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)


def state(scheduler: Any, request: Request) -> Any:
    blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    left_out = {"_block_hasher", "events", "prefill_stats", "sampling_params"}
    return (
        {name: plain(value) for name, value in vars(request).items() if name not in left_out},
        [[(block.block_id, block.ref_cnt, block.block_hash) for block in group] for group in blocks],
        [group.num_cached_block.get(request.request_id) for group in groups_of(scheduler)],
    )


def groups_of(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.coordinator.single_type_managers


def plain(value: Any) -> Any:
    """Copies what can be compared: objects as their fields, without times."""
    if isinstance(value, str | int | float | bytes | None):
        return value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple | collections.deque):
        return [plain(item) for item in value]
    if fields := getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None):
        return {name: plain(getattr(value, name)) for name in fields if name not in ("timestamp", "events")}
    return type(value).__name__


LOADS = {
    "many blocks": Load(seed=1),
    "few blocks": Load(seed=2, blocks=16),
    "few blocks and priorities": Load(seed=3, blocks=16, policy="priority"),
    "one batch at a time": Load(seed=4, blocks=20, batches=1),
    "three batches": Load(seed=5, blocks=20, batches=3),
    "prompts in small parts": Load(seed=6, batched_tokens=9),
    "older runner": Load(seed=7, blocks=20, newer_runner=False),
    "without asynchronous scheduling": Load(seed=8, blocks=16, scheduler=Scheduler, batches=1),
    "sliding window": Load(seed=9, blocks=24, spec=SlidingWindowSpec),
    "two groups": Load(seed=10, blocks=40, spec=SlidingWindowSpec, groups=2),
    "without prefix caching": Load(seed=12, blocks=20, caching=False),
    "lookahead": Load(seed=13, blocks=20, lookahead=2),
}
by_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
OTHERS = ("sliding window", "two groups", "without prefix caching")


_unpatched: dict[Load, list[Any]] = {}
"""What could be seen of each load without our patches."""


def expected(config: Any, load: Load) -> list[Any]:
    if load not in _unpatched:
        _unpatched[load] = run(config, load)
    return _unpatched[load]


@by_load
@pytest.mark.parametrize("patch", [*(patch.name for patch in decode_steps.PATCHES), None])
def test_scheduler_does_the_same_with_each_patch_and_with_all(
    config: Any, patched: Any, load: Load, patch: str | None
) -> None:
    if patch is None:
        load = dataclasses.replace(load, seed=load.seed + 100)
    theirs = expected(config, load)
    patched(*filter(None, [patch]))
    assert_alike(run(config, load), theirs)


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    """Names the first thing that differs; all of them would be too long to read."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        assert ours == theirs, number
    assert len(found) == len(expected)


@pytest.mark.parametrize("name", LOADS)
def test_other_caches_are_left_to_vllm(config: Any, patched: Any, name: str) -> None:
    patched()
    slots = make_scheduler(config, LOADS[name]).kv_cache_manager.dynamo_vllm_slots
    assert (slots is None) == (name in OTHERS)


def test_loads_preempt_stop_and_hit_the_cache(config: Any) -> None:
    """Tests the test: the loads lead to what the patches must not change."""
    seen = expected(config, LOADS["few blocks"])
    outputs = [step for step in seen if isinstance(step, dict)]
    ends = {
        output["finish_reason"]
        for step in seen
        if isinstance(step, list)
        for outputs_of_client in step
        if isinstance(outputs_of_client, list)
        for output in outputs_of_client
        if isinstance(output, dict) and "finish_reason" in output
    }
    assert any(step["preempted_req_ids"] for step in outputs)
    assert any(new["num_computed_tokens"] for step in outputs for new in step["scheduled_new_reqs"])
    assert len(ends) >= 4  # None, stop, length, repetition
    assert {event["block_size"] for event in seen[-1] if "block_size" in event} == {BLOCK}


@pytest.mark.parametrize(
    ("patch", "owner", "name", "most"),
    [
        ("decode-slots", KVCacheManager, "allocate_slots", 0.6),  # a block has only four tokens here
        ("decode-tokens", AsyncScheduler, "_update_request_with_output", 0.3),
        ("decode-batches", KVCacheManager, "allocate_slots", 0.8),
    ],
)
def test_vllm_is_asked_less_often(
    config: Any, patched: Any, monkeypatch: pytest.MonkeyPatch, patch: str, owner: Any, name: str, most: float
) -> None:
    calls = 0

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return ORIGINALS[owner, name](*args, **named)

    monkeypatch.setattr(owner, name, counted)
    run(config, LOADS["many blocks"])
    before, calls = calls, 0
    patched(patch)
    run(config, LOADS["many blocks"])
    assert calls < most * before


class Decoding(NamedTuple):
    scheduler: Any
    request: Any


@pytest.fixture
def decoding(config: Any, patched: Any) -> Decoding:
    """Returns a scheduler whose only request decodes."""
    patched("decode-batches")
    scheduler = make_scheduler(config, Load(seed=0))
    request = Request("request", [10], SamplingParams(max_tokens=9), None)
    scheduler.add_request(request)
    scheduler.update_from_output(output := scheduler.schedule(), sampled(scheduler, output, random.Random(0)))
    return Decoding(scheduler, request)


def only_decodes(decoding: Decoding) -> bool:
    scheduler = decoding.scheduler
    return decode_steps._may_all_decode(scheduler) and decode_steps._Decodes.of(scheduler) is not None


def test_request_that_decodes_is_seen(decoding: Decoding) -> None:
    assert only_decodes(decoding)
    decoding.scheduler.add_request(Request("other", [10], SamplingParams(max_tokens=9), None))
    assert not only_decodes(decoding)


OF_A_REQUEST: dict[str, object] = {
    "mm_features": [object()],
    "structured_output_request": object(),
    "spec_token_ids": [1],
    "is_prefill_chunk": True,
    "next_decode_eligible_step": 99,
    "num_computed_tokens": 0,
}
OF_AN_ENGINE: dict[str, object] = {
    "connector": object(),
    "ec_connector": object(),
    "aux_output_connector": object(),
    "use_pp": True,
    "use_v2_model_runner": False,
    "num_lookahead_tokens": 1,
    "num_sampled_tokens_per_step": 0,
    "max_num_scheduled_tokens": 0,
    "max_model_len": 2,
    "_inflight_prefills": {object()},
    "_pause_state": PauseState.PAUSED_ALL,
}


def test_request_or_engine_that_does_more_is_left_to_vllm(decoding: Decoding) -> None:
    for owner, values in ((decoding.request, OF_A_REQUEST), (decoding.scheduler, OF_AN_ENGINE)):
        for name, value in values.items():
            assert getattr(owner, name) != value
            with pytest.MonkeyPatch.context() as changed:
                changed.setattr(owner, name, value)
                assert not only_decodes(decoding), name
            assert only_decodes(decoding)
