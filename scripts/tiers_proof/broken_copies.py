"""Tiers that are wrong on purpose: the proof must find each of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamo_vllm.engine.tiers.host_copies import HostCopies
from dynamo_vllm.engine.tiers.spec import Tiers


class NextBlock(HostCopies):
    """Loads the last block of a prompt from the chunk of the block before it."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        if len(src_spec.block_ids) > 1:
            src_spec.block_ids = np.append(src_spec.block_ids[:-1], src_spec.block_ids[-2])
        return super().submit_load(job_id, src_spec, dst_spec)


class OneLayerLess(HostCopies):
    """Leaves out one layer of the first group."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        whole = self._groups
        self._groups = [whole[0][:-1], *whole[1:]]
        try:
            return super().submit_load(job_id, src_spec, dst_spec)
        finally:
            self._groups = whole


class OtherGroup(HostCopies):
    """Copies the blocks of the first group into the second, and the other way round."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        sizes = list(dst_spec.group_sizes)
        if len(sizes) > 1 and sizes[0] and sizes[1]:
            first, second = src_spec.block_ids[: sizes[0]], src_spec.block_ids[sizes[0] : sizes[0] + sizes[1]]
            moved = np.resize(second, len(first)), np.resize(first, len(second))
            src_spec.block_ids = np.concatenate([*moved, src_spec.block_ids[sizes[0] + sizes[1] :]])
        return super().submit_load(job_id, src_spec, dst_spec)


class HalfPage(HostCopies):
    """Stores the first half of each page."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tier in self._tier:
            tier[dst_spec.block_ids.tolist(), tier.shape[1] // 2 :] = 0
        done = super().submit_store(job_id, src_spec, dst_spec)
        for tier in self._tier:
            tier[dst_spec.block_ids.tolist(), tier.shape[1] // 2 :] = 0
        return done


KINDS = {
    "next-block": NextBlock,
    "one-layer-less": OneLayerLess,
    "other-group": OtherGroup,
    "half-page": HalfPage,
}


class BrokenTiers(Tiers):
    """The tiers of a CPU engine with copies of one of `KINDS`."""

    def get_worker(self, kv_caches: Any) -> Any:
        made = super().get_worker(kv_caches)
        if type(made) is not HostCopies:
            raise TypeError("only a CPU engine has these copies")
        made.__class__ = KINDS[self.extra_config["broken"]]
        return made
