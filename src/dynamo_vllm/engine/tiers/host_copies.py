"""Copies blocks between the KV cache of a CPU engine and the host tier.

vLLM has such a worker for GPUs only. On CPU a step has written its blocks when it returns, and nothing runs
beside it, so a copy is done when it is submitted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


class HostCopies(OffloadingWorker):  # type: ignore[misc]  # vLLM has no types
    """Moves blocks, one chunk of the tier for each."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._groups = caches.group_data_refs
        self._engine = [
            found.tensor.view(torch.int8).view(-1, found.page_size_bytes) for found in caches.tensors
        ]
        self._tier = [region.create_next_worker_view(found.page_size_bytes) for found in caches.tensors]
        self._region = region
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(
        self, job_id: int, blocks: GPULoadStoreSpec, chunks: BlockIDsLoadStoreSpec, *, is_store: bool
    ) -> bool:
        begun, first, size = time.monotonic(), 0, 0
        here, there = torch.from_numpy(blocks.block_ids).long(), torch.from_numpy(chunks.block_ids).long()
        for count, refs in zip(blocks.group_sizes, self._groups, strict=True):
            mine, its = here[first : first + count], there[first : first + count]
            first += count
            for ref in refs if count else ():
                engine, tier = self._engine[ref.tensor_idx], self._tier[ref.tensor_idx]
                width = ref.page_size_bytes
                if is_store:
                    tier[its, :width] = engine[mine, :width]
                else:
                    engine[mine, :width] = tier[its, :width]
                size += count * width
        self._done.append(TransferResult(job_id, True, size, time.monotonic() - begun))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass  # a submitted copy is done

    def shutdown(self) -> None:
        self._engine.clear()
        self._tier.clear()
        self._region.cleanup()
