"""Is vLLM's manager of tiers, with one more figure, and can be emptied at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ScheduleEndContext

# vLLM clears only metrics with its own prefix before it makes them a second time in a process.
HOST_BYTES = "vllm:kv_offload_host_bytes"


class TierManager(TieringOffloadingManager):  # type: ignore[misc]  # vLLM has no types
    """Tells how full the host memory is, and asks for one more step after it was emptied during stores.

    vLLM tells only how much of the memory transfers have pinned. And vLLM (0.30 to 0.32) tells its workers
    with the next step that such stores are void, and refuses to be emptied again before; but an idle engine
    makes no step. Two clear-kv in a row would fail, and sleep too.
    """

    _owes_step = False

    def reset_cache(self) -> None:
        self._owes_step = any(state.pending_primary_stores for state in self._req_state.values())
        super().reset_cache()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        super().on_schedule_end(context)
        self._owes_step = False

    def has_pending_work(self) -> bool:
        return self._owes_step or bool(super().has_pending_work())

    def get_stats(self) -> Any:
        stats, host = super().get_stats() or OffloadingConnectorStats(), self.primary_tier
        chunks = host._num_allocated_chunks - len(host._free_list)
        stats.set_gauge(HOST_BYTES, chunks * host.get_kv_memoryview().strides[0])
        return stats
