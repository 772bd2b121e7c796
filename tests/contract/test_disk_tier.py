"""The disk tier behind vLLM's own host tier and manager, without an engine: interfaces, metrics, events."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload import config as offloading
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from dynamo_vllm.engine.tiers import full_host
from dynamo_vllm.engine.tiers.disk_files import FOLDER
from dynamo_vllm.engine.tiers.disk_tier import DiskTier, fingerprint
from dynamo_vllm.engine.tiers.spec import Tiers
from harness.waiting import until

PAGE = 8192
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
METRICS = {
    "vllm:kv_offload_disk_bytes",
    "vllm:kv_offload_disk_chunks",
    "vllm:kv_offload_disk_paused",
    "vllm:kv_offload_disk_failures_total",
    "vllm:kv_offload_disk_dropped_chunks_total",
    "vllm:kv_offload_disk_evicted_chunks_total",
}


def extra(folder: Path, host_chunks: int = 16, disk_chunks: int = 40) -> dict[str, Any]:
    tier = {
        "type": "DiskTier",
        "module_path": "dynamo_vllm.engine.tiers.disk_tier",
        "folder": str(folder),
        "limit_bytes": disk_chunks * (PAGE + 4096),
        "identity": "1",
    }
    return {
        "spec_name": "Tiers",
        "spec_module_path": "dynamo_vllm.engine.tiers.spec",
        "cpu_bytes_to_use": host_chunks * PAGE,
        "self_describing_kv_events": True,
        "secondary_tiers": [tier],
    }


def config(folder: Path, **sizes: int) -> Any:
    return offloading.OffloadingConfig(
        groups=(offloading.OffloadingGroupConfig(tokens_per_block=32, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=PAGE,
        enable_kv_cache_events=True,
        extra_config=extra(folder, **sizes),
        engine_id=f"test-{uuid.uuid4().hex}",
        model=offloading.OffloadingModelConfig(name="tiny", dtype="float32"),
        cache=offloading.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=offloading.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


@dataclass
class Engine:
    """What an engine's scheduler does with its tiers."""

    manager: Any
    requests: int = 0

    @property
    def tier(self) -> DiskTier:
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, DiskTier)
        return tier

    def step(self) -> None:
        self.manager.on_schedule_end(STEP)

    def works(self) -> bool:
        self.step()
        return self.tier._cache._can_store

    def is_idle(self) -> bool:
        self.step()
        return not self.manager.has_pending_work()

    def request(self) -> Any:
        self.requests += 1
        context = ReqContext(req_id=str(self.requests))
        self.manager.on_new_request(context)
        return context

    def fill(self) -> None:
        """Stores blocks 1 to 24, of which host memory has room for 16."""
        for first in range(1, 25, 4):
            self.store(*range(first, first + 4))

    def store(self, *numbers: int) -> None:
        """A request whose blocks contain their numbers leaves them to the tiers."""
        context, keys = self.request(), [key(number) for number in numbers]
        made = self.manager.prepare_store(keys, context)
        rows = dict(zip(made.keys_to_store, made.store_spec.chunk_ids.tolist(), strict=True))
        for number in numbers:
            if key(number) in rows:
                self.view()[rows[key(number)], :] = number
        self.manager.complete_store(set(made.keys_to_store), context)
        self.manager.on_request_finished(context)
        until("it is stored", self.is_idle)

    def view(self) -> Any:
        return np.asarray(memoryview(self.manager.primary_tier.get_kv_memoryview()))

    def look(self, number: int, context: Any = None) -> Any:
        return self.manager.lookup(key(number), context or self.request())

    def load(self, *numbers: int) -> list[int]:
        """Returns what the blocks contain that a request finds; it waits for tiers as the scheduler does."""
        context = self.request()

        def looked() -> bool:
            found = [self.look(number, context) for number in numbers]
            self.step()
            return LookupResult.HIT_PENDING not in found

        until("all lookups are answered", looked)
        keys = [key(number) for number in numbers if self.look(number, context) is LookupResult.HIT]
        rows = self.manager.prepare_load(keys, context).chunk_ids.tolist()
        values = [int(self.view()[row][0]) for row in rows]
        assert all((self.view()[row] == self.view()[row][0]).all() for row in rows)
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        return values


def key(number: int) -> Any:
    return make_offload_key(bytes([number]) * 32, 0)


@contextmanager
def engine(folder: Path, **sizes: int) -> Iterator[Engine]:
    spec = OffloadingSpecFactory.create_spec(config(folder, **sizes))
    assert isinstance(spec, Tiers)
    made = Engine(spec.get_manager())
    try:
        until("the folder is open", made.works)
        yield made
    finally:
        made.manager.shutdown()
    assert not list(Path("/dev/shm").glob(f"*{spec._engine_id}*"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{FOLDER}/*/*/*/??/*"))


def test_blocks_that_left_host_memory_come_from_disk(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.fill()
        assert made.look(1) is not LookupResult.HIT
        assert made.load(1, 2, 3) == [1, 2, 3] and made.load(7, 8, 24) == [7, 8, 24]
    with engine(tmp_path) as made:
        assert made.load(4, 5, 9) == [4, 5, 9]
        assert made.load(25) == []


def test_requests_that_want_more_than_host_memory_holds_do_not_starve_each_other(tmp_path: Path) -> None:
    """Each of them would replace the blocks that another one has just brought from disk."""
    with engine(tmp_path) as made:
        made.fill()
        waiting = {first: made.request() for first in (1, 7, 13, 19)}
        assert len(waiting) * 6 > 16

        def step() -> bool:
            for first, context in list(waiting.items()):
                found = [made.look(number, context) for number in range(first, first + 6)]
                if LookupResult.HIT_PENDING not in found:
                    made.manager.on_request_finished(waiting.pop(first))
            made.step()
            return not waiting

        until("all have their blocks or compute", step, every=0)


def test_what_a_slow_disk_drops_is_the_end_of_a_prompt(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        context = made.request()
        if not hasattr(context, "set_offload_key_position"):
            pytest.skip("this vLLM does not tell the order")
        for number in range(1, 13):
            context.set_offload_key_position(key(number), 32 * number)
        kept = made.manager.prepare_store([key(number) for number in range(1, 13)], context)
        made.manager.complete_store(set(kept.keys_to_store), context)
        until("it is stored", made.is_idle)
        assert [made.tier._cache.has(key(number)) for number in range(1, 13)] == [True] * 4 + [False] * 8


def test_a_reset_empties_every_tier_and_does_not_wait_for_a_hanging_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asserts that no job is left after it."""
    released, reached, real = threading.Event(), threading.Event(), os.preadv

    def hang(*args: Any) -> int:
        reached.set()
        released.wait(60)
        return real(*args)

    with engine(tmp_path) as made:
        made.fill()
        monkeypatch.setattr(os, "preadv", hang)
        assert made.look(1) is LookupResult.HIT_PENDING
        made.step()
        assert reached.wait(60)
        made.manager.reset_cache()
        assert made.look(1) is LookupResult.MISS and made.look(24) is LookupResult.MISS
        released.set()
        until("it works again", made.works)
        assert files(tmp_path) == []
        made.store(9)
        assert made.load(9) == [9]


def test_a_failed_load_is_a_miss_for_its_request(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.fill()
        (broken,) = [path for path in files(tmp_path) if path.name.startswith("02" * 32)]
        broken.write_bytes(broken.read_bytes()[::-1])
        assert made.load(1, 2, 3) == [1, 3]
        assert made.load(2) == []


def test_metrics_reach_a_page_of_prometheus(tmp_path: Path) -> None:
    given = extra(tmp_path)
    unregister_vllm_metrics()
    try:
        for _ in range(2):  # vLLM may make them again in one process
            unregister_vllm_metrics()
            page = OffloadPromMetrics(
                SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=given)),
                {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
                ["engine"],
                {0: ["0"]},
            )
        with engine(tmp_path, disk_chunks=6) as made:
            made.store(1, 2, 3)
            made.store(4, 5, 6, 7, 8)
            made.tier._cache._fail("slow", "?")
            page.observe(made.manager.get_stats().data)
            page.observe(made.manager.get_stats().data)
        text = generate_latest(REGISTRY).decode()
    finally:
        unregister_vllm_metrics()
    assert {line.split("{")[0].split()[-1] for line in text.splitlines() if "{" in line} >= METRICS
    assert 'vllm:kv_offload_disk_failures_total{engine="0",reason="slow"} 1.0' in text
    assert 'vllm:kv_offload_disk_paused{engine="0"} 1.0' in text
    assert 'vllm:kv_offload_disk_chunks{engine="0"} 3.0' in text


def test_events_name_the_disk(tmp_path: Path) -> None:
    tracker = OffloadingEventsTracker(
        SimpleNamespace(enable_kv_cache_events=True, self_describing_kv_events=False)
    )
    with engine(tmp_path) as made:
        made.store(1, 2)
        stored = list(tracker.take_events(made.manager.take_events()))
        made.manager.reset_cache()
        removed = list(tracker.take_events(made.manager.take_events()))
    on_disk = [event for event in stored if event.medium == "STORAGE"]
    assert len(on_disk) == 2 and all(isinstance(event, BlockStored) for event in stored)
    assert {event.locality for event in on_disk} == {"LOCAL"}
    assert [type(event) for event in removed] == [BlockRemoved] and len(removed[0].block_hashes) == 2


def test_the_fingerprint_knows_what_values_depend_on(tmp_path: Path) -> None:
    plain = config(tmp_path)

    def of(identity: str = "1", chunk_bytes: int = PAGE, **changes: Any) -> str:
        return fingerprint(identity, dataclasses.replace(plain, **changes), chunk_bytes)

    parallel, group = plain.parallel, plain.groups[0]
    others = [
        of(identity="2"),
        of(chunk_bytes=2 * PAGE),
        of(model=offloading.OffloadingModelConfig(name="tiny", dtype="bfloat16")),
        of(cache=offloading.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1)),
        of(cache=offloading.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=2)),
        of(groups=(dataclasses.replace(group, tokens_per_block=16),)),
        of(groups=(dataclasses.replace(group, layer_names=("a", "c")),)),
        of(groups=(group, dataclasses.replace(group, group_id=1))),
        of(parallel=dataclasses.replace(parallel, tp_size=2)),
        of(parallel=dataclasses.replace(parallel, pp_size=2)),
        of(worker_kv_bytes_per_block=2 * PAGE),
        of(kv_cache_layout="NHD"),
        of(canonical_layout=True),
        of(replicated_layout=True),
    ]
    assert len({of(), *others}) == len(others) + 1
    same = [
        of(engine_id="other"),
        of(enable_kv_cache_events=False),
        of(extra_config={}),
        of(parallel=dataclasses.replace(parallel, rank=1, data_parallel_index=1, data_parallel_rank_local=1)),
        of(model=offloading.OffloadingModelConfig(name="/elsewhere/tiny", dtype="float32")),
    ]
    assert set(same) == {of()}


def test_host_memory_for_less_than_four_blocks_is_refused_with_what_works(tmp_path: Path) -> None:
    for chunks in (0, 3):
        given = config(tmp_path, host_chunks=chunks)
        given.extra_config["cpu_bytes_to_use"] += 100
        with pytest.raises(ValueError, match=r"gives each engine \d+ bytes .* give at least 0\.001 GB"):
            OffloadingSpecFactory.create_spec(given)
    assert OffloadingSpecFactory.create_spec(config(tmp_path, host_chunks=4))


def test_host_memory_does_not_outlive_an_engine_whose_disk_tier_did_not_start(tmp_path: Path) -> None:
    """The worker has mapped it before, and left its name to the scheduler."""
    spec = OffloadingSpecFactory.create_spec(config(tmp_path, disk_chunks=2))
    sizes = {"kv_bytes_per_chunk": spec.kv_bytes_per_chunk, "cpu_page_size": spec.cpu_page_size_per_worker}
    mapped = SharedOffloadRegion(engine_id=spec._engine_id, num_chunks=spec.num_chunks, rank=0, **sizes)
    mapped._creator = False
    with pytest.raises(ValueError, match="--kv-offload-disk gives each engine"):
        spec.get_manager()
    assert not Path(mapped.mmap_path).exists()
    mapped.cleanup()


def test_vllms_interfaces_are_those_that_the_tier_implements() -> None:
    assert not DiskTier.__abstractmethods__
    called = {name for name, value in vars(SecondaryTierManager).items() if callable(value)}
    assert {name for name, value in vars(DiskTier).items() if callable(value)} <= called
    fields = [field.name for field in dataclasses.fields(JobResult)]
    assert fields[:4] == ["job_id", "success", "successful_keys", "transfer_time"]


def test_vllm_says_that_the_host_memory_is_full_in_the_words_that_we_look_for() -> None:
    module = importlib.import_module(full_host.LOGGER)
    assert module.logger.name == full_host.LOGGER
    assert f'logger.warning("{full_host.VLLM_SAYS}"' in inspect.getsource(module)
