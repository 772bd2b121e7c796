"""Is a tier of vLLM's OffloadingConnector on a local disk, behind the one in host memory.

vLLM creates it from its configuration (`folder`, `limit_bytes`, and `identity`, which is made by
`dynamo_vllm.kv.model_identity`). It calls all methods in the engine's scheduler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from dynamo_vllm.engine.tiers.disk_cache import DiskCache, most_chunks
from dynamo_vllm.engine.tiers.disk_files import FORMAT
from dynamo_vllm.engine.tiers.disk_keeper import Place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from dynamo_vllm.engine.vllm.names import OffloadingConfig, OffloadingSpec, TransferJob

# vLLM clears only metrics with its own prefix before it makes them a second time in a process.
BYTES, CHUNKS = "vllm:kv_offload_disk_bytes", "vllm:kv_offload_disk_chunks"
PAUSED = "vllm:kv_offload_disk_paused"
FAILURES = "vllm:kv_offload_disk_failures"
DROPPED, EVICTED = "vllm:kv_offload_disk_dropped_chunks", "vllm:kv_offload_disk_evicted_chunks"
_OF_ONE_PROCESS = ("extra_config", "engine_id", "enable_kv_cache_events")
_OF_ONE_RANK = ("rank", "data_parallel_index", "data_parallel_rank_local")


class DiskTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types
    """Stores what enters host memory also on disk, and brings it back when a prompt begins with it."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        folder: str,
        limit_bytes: int,
        identity: str,
        backpressure_detector: object = None,
    ) -> None:
        """vLLM 0.31 and newer pass a detector of slow tiers; this one has its own."""
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.LOCAL
        # A view of our own: vLLM releases its own at the end, and cannot if an array uses it.
        rows = np.asarray(memoryview(primary_kv_view)).view(np.uint8)
        chunk_bytes = rows.shape[1]
        place = Place(
            root=Path(folder),
            fingerprint=fingerprint(identity, offloading_spec.config, chunk_bytes),
            chunk_bytes=chunk_bytes,
            most_chunks=most_chunks(int(limit_bytes), chunk_bytes),
        )
        tells = offloading_spec.kv_events_config.enable_kv_cache_events
        self._cache = DiskCache(place, rows, tells_changes=tells)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return LookupResult.HIT if self._cache.offers(key, req_context.req_id) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._cache.store(job_metadata.job_id, _in_order(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._cache.load(job_metadata.job_id, _moves(job_metadata), job_metadata.req_context.req_id)

    def get_finished_jobs(self) -> Iterable[Any]:
        return [
            JobResult(done.job_id, done.is_whole, tuple(done.loaded) or None, done.seconds)
            for done in self._cache.finished()
        ]

    def on_schedule_end(self, context: object) -> None:
        self._cache.end_step()

    def on_new_request(self, req_context: object) -> Any:
        return RequestOffloadingContext()

    def touch(self, keys: Collection[bytes], req_context: object) -> None:
        self._cache.touch(keys)

    def take_events(self) -> Iterable[Any]:
        return [
            OffloadingEvent(
                keys=list(change.keys),
                medium=self.medium,
                removed=change.is_removed,
                locality=self.locality,
                removal_expected=True,
            )
            for change in self._cache.changes()
        ]

    def drain_jobs(self) -> None:
        """Is called by vLLM only when it resets all caches, where it leaves those of tiers like this one."""
        self._cache.reset()

    def shutdown(self) -> None:
        self._cache.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, object]) -> dict[str, Any]:
        return {
            BYTES: OffloadingGaugeMetadata("Bytes of KV caches on disk."),
            CHUNKS: OffloadingGaugeMetadata("Chunks of KV caches on disk."),
            PAUSED: OffloadingGaugeMetadata("1 while the disk has failed or is full."),
            FAILURES: OffloadingCounterMetadata(
                "Failures of the disk with KV caches, by reason: full, slow, damaged, error.", ("reason",)
            ),
            DROPPED: OffloadingCounterMetadata("Chunks that a paused or slow disk did not get."),
            EVICTED: OffloadingCounterMetadata("Chunks that were removed from disk for others."),
        }

    def get_stats(self) -> Any:
        stats, cache, counts = OffloadingConnectorStats(), self._cache, self._cache.take_counts()
        stats.set_gauge(BYTES, cache.used_bytes)
        stats.set_gauge(CHUNKS, len(cache))
        stats.set_gauge(PAUSED, int(cache.is_paused))
        for reason, count in counts.failures.items():
            stats.increase_counter(FAILURES, count, (reason,))
        for name, count in ((DROPPED, counts.dropped), (EVICTED, counts.evicted)):
            if count:
                stats.increase_counter(name, count)
        return stats


def _moves(job: TransferJob) -> list[tuple[bytes, int]]:
    return list(zip(job.keys, job.chunk_ids.tolist(), strict=True))


def _in_order(job: TransferJob) -> list[tuple[bytes, int]]:
    """Returns the chunks as they stand in the prompt, whose end is of no use without its beginning.

    vLLM 0.30 does not tell.
    """
    position = getattr(job.req_context, "get_offload_key_position", lambda key: None)
    return sorted(_moves(job), key=lambda move: position(move[0]) or 0)


def fingerprint(identity: str, config: OffloadingConfig, chunk_bytes: int) -> str:
    """Returns a name for everything that the values in a chunk depend on, as the engine sees it."""
    known = {name: value for name, value in vars(config).items() if name not in _OF_ONE_PROCESS}
    known["model"] = config.model.dtype  # its files are part of the identity, wherever they lie
    known["groups"] = [dataclasses.asdict(group) for group in config.groups]
    known["cache"] = dataclasses.asdict(config.cache)
    parallel = dataclasses.asdict(config.parallel)
    known["parallel"] = {name: value for name, value in parallel.items() if name not in _OF_ONE_RANK}
    whole = (FORMAT, identity, vllm.__version__, torch.__version__, chunk_bytes, known)
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]
