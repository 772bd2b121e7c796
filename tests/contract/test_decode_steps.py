"""Tests that vLLM's scheduler does the same with our faster decode steps as without them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
import time
from typing import Any

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
from dynamo_vllm.models.tiny import make_tiny_model

BLOCK, MAX_MODEL_LEN, END_TOKEN, STOP_TOKEN = 4, 48, 3, 4
TOKENS = [END_TOKEN, STOP_TOKEN, *range(10, 25), *[10] * 15]
ORIGINALS = {
    (KVCacheManager, "__init__"): KVCacheManager.__init__,
    (KVCacheManager, "allocate_slots"): KVCacheManager.allocate_slots,
    (AsyncScheduler, "_update_request_with_output"): AsyncScheduler._update_request_with_output,
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
    """Returns a function that applies the patches; they are removed after the test."""
    for (owner, name), original in ORIGINALS.items():
        monkeypatch.setattr(owner, name, original)

    def apply() -> None:
        for patch in decode_steps.PATCHES:
            patch.apply()

    return apply


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Describes requests that arrive at random, and an engine for them."""

    seed: int
    blocks: int = 64
    batched_tokens: int = 24
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
    settings.policy = load.policy
    config.cache_config.enable_prefix_caching = load.caching
    config.cache_config.num_gpu_blocks = load.blocks
    more = {"sliding_window": 2 * BLOCK} if load.spec is SlidingWindowSpec else {}
    specs = [load.spec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, **more)]
    if load.groups == 2:
        specs.append(FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32))
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    scheduler: Any = load.scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=load.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
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


def run(config: Any, load: Load, requests: int = 40) -> list[Any]:
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
        while len(made) < requests and rng.random() < 0.4:
            made.append(make_request(rng, len(made), load))
            scheduler.add_request(made[-1])
        if made and rng.random() < 0.02:
            scheduler.finish_requests(rng.choice(made).request_id, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        if scheduler.has_requests():
            output = scheduler.schedule()
            seen.append(plain(output))
            scheduled.append((output, sampled(scheduler, output, rng)))
        if scheduled and (len(scheduled) >= load.batches or not scheduler.has_requests()):
            outputs = scheduler.update_from_output(*scheduled.popleft())
            seen.append([plain(about.outputs) for about in outputs.values()])
        seen.append([state(scheduler, request) for request in scheduler.requests.values()])
        seen.append((manager.block_pool.get_num_free_blocks(), manager.usage))
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


@by_load
@pytest.mark.parametrize("again", range(2))
def test_scheduler_does_the_same(config: Any, patched: Any, load: Load, again: int) -> None:
    load = dataclasses.replace(load, seed=load.seed + 100 * again)
    expected = run(config, load)
    patched()
    for number, (found, wanted) in enumerate(zip(run(config, load), expected, strict=True)):
        assert found == wanted, number


@pytest.mark.parametrize("name", LOADS)
def test_other_caches_are_left_to_vllm(config: Any, patched: Any, name: str) -> None:
    patched()
    slots = make_scheduler(config, LOADS[name]).kv_cache_manager.dynamo_vllm_slots
    assert (slots is None) == (name in OTHERS)


def test_loads_preempt_stop_and_hit_the_cache(config: Any) -> None:
    """Tests the test: the loads lead to what the patches must not change."""
    seen = run(config, LOADS["few blocks"])
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


def test_most_tokens_need_no_function_of_vllm(
    config: Any, patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = collections.Counter[str]()

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return original(*args, **named)

        return call

    for (owner, name), original in ORIGINALS.items():
        monkeypatch.setattr(owner, name, counted(f"vLLM's {name}", original))
    patched()
    for owner, name in ORIGINALS:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    run(config, LOADS["many blocks"])
    assert calls["vLLM's allocate_slots"] < calls["allocate_slots"] * 0.6  # a block has only four tokens here
    update = "_update_request_with_output"
    assert calls[f"vLLM's {update}"] < calls[update] * 0.1


def test_steps_are_cheaper(config: Any, patched: Any) -> None:
    """Compares the time of vLLM's functions and ours for a request whose last block has room."""
    patched()
    load = Load(seed=0)
    scheduler = make_scheduler(config, load)
    manager = scheduler.kv_cache_manager
    request = make_request(random.Random(0), 0, load)
    request.num_computed_tokens = 0
    request.status = RequestStatus.RUNNING
    assert manager.allocate_slots(request, request.num_tokens) is not None
    request.num_computed_tokens = request.num_tokens - 1
    theirs, ours = ORIGINALS[KVCacheManager, "allocate_slots"], KVCacheManager.allocate_slots
    seconds: dict[Any, list[float]] = {theirs: [], ours: []}
    for _ in range(20):
        for allocate, spent in seconds.items():
            began = time.thread_time()
            for _ in range(200):
                assert allocate(manager, request, 1, num_lookahead_tokens=0) is manager.empty_kv_cache_blocks
            spent.append(time.thread_time() - began)
    assert min(seconds[ours]) < 0.4 * min(seconds[theirs])
