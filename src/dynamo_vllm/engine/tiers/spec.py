"""The tiers of one engine, as vLLM's OffloadingConnector creates them from its extra config."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingGaugeMetadata
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.patches.patch import Where
from dynamo_vllm.engine.tiers import full_host
from dynamo_vllm.engine.tiers.host_copies import HostCopies
from dynamo_vllm.engine.tiers.manager import HOST_BYTES, TierManager
from dynamo_vllm.engine.tiers.refusals import refuse_engines_without_prefix_caching, refuse_several_machines

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker

    from dynamo_vllm.engine.vllm.names import OffloadingConfig

LEAST_CHUNKS = 4
"""With fewer, one waits for the disk or is being loaded, and hardly any is kept."""


class Tiers(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM has no types
    """vLLM's tiers, also for a CPU engine, and without memory that outlives a killed engine."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        host_bytes = OffloadingGaugeMetadata("Bytes of KV caches in host memory.")
        return {**super().build_metric_definitions(extra_config), HOST_BYTES: host_bytes}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        # vLLM leaves it at 0 where it knows no size yet.
        if self.kv_bytes_per_chunk and self.num_chunks < LEAST_CHUNKS:
            least = LEAST_CHUNKS * self.kv_bytes_per_chunk
            raise ValueError(
                f"--kv-offload-gb gives each engine {self.extra_config['cpu_bytes_to_use']} bytes of host "
                f"memory, too few for blocks of {self.kv_bytes_per_chunk}; give at least "
                f"{math.ceil(least / 1e6) / 1e3:g} GB for each (data-parallel ranks share it)"
            )

    def get_manager(self) -> OffloadingManager:
        table.apply(Where.TIERS)
        full_host.install()
        try:
            made = super().get_manager()
        except Exception:  # such as a disk tier that does not start; the memory must not outlive the engine
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/vllm_offload_{self._engine_id}.mmap")
            raise
        if not isinstance(made, TierManager):
            self._manager = made = TierManager(made.primary_tier, made.secondary_tiers)
        if self._scheduler_mmap is not None:
            # The workers have mapped it before the scheduler exists. Without its name the kernel frees the
            # memory when the last process ends, however it ends.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._scheduler_mmap.mmap_path)
            self._scheduler_mmap._creator = False
        return made

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        refuse_engines_without_prefix_caching()
        if self.secondary_tier_configs and self.config.parallel.world_size > 1:
            refuse_several_machines()
        if not current_platform.is_cpu():
            made = super().get_worker(kv_caches)
            if made._mmap_region is not None:
                made._mmap_region._creator = False  # the scheduler removes the name
            return made
        if self.blocks_per_chunk != 1:
            raise ValueError("an engine on CPU has one block in a chunk; leave blocks_per_chunk out")
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,  # as vLLM does on a GPU
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        region._creator = False
        return HostCopies(kv_caches, region)
