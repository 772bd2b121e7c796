"""Tiers that are wrong on purpose: the proof must find each of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamo_vllm.engine.tiers.host_copies import HostCopies
from dynamo_vllm.engine.tiers.spec import Tiers


def next_block(src_spec: Any, _dst_spec: Any) -> None:
    """Loads the last block of a prompt from the chunk of the block before it."""
    if len(src_spec.block_ids) > 1:
        src_spec.block_ids = np.append(src_spec.block_ids[:-1], src_spec.block_ids[-2])


def other_group(src_spec: Any, dst_spec: Any) -> None:
    """Loads the blocks of the first group into the second, and the other way round."""
    sizes = list(dst_spec.group_sizes)
    if len(sizes) > 1 and sizes[0] and sizes[1]:
        first, second, rest = np.split(src_spec.block_ids, [sizes[0], sizes[0] + sizes[1]])
        swapped = [np.resize(second, len(first)), np.resize(first, len(second)), rest]
        src_spec.block_ids = np.concatenate(swapped)


class OneLayerLess(HostCopies):
    """Leaves out one layer of the first group."""

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        whole = self._groups
        self._groups = [whole[0][:-1], *whole[1:]]
        try:
            return super().submit_load(job_id, src_spec, dst_spec)
        finally:
            self._groups = whole


class HalfPage(HostCopies):
    """Stores the first half of each page."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        done = super().submit_store(job_id, src_spec, dst_spec)
        for tier in self._tier:
            tier[dst_spec.block_ids.tolist(), tier.shape[1] // 2 :] = 0
        return done


LOADS = {"next-block": next_block, "other-group": other_group}
"""What is done to a load before it is submitted, on any device."""
COPIES: dict[str, type[HostCopies]] = {"one-layer-less": OneLayerLess, "half-page": HalfPage}
"""Copies of a CPU engine."""


class BrokenTiers(Tiers):
    """Tiers that are wrong in one of these ways."""

    def get_worker(self, kv_caches: Any) -> Any:
        made, kind = super().get_worker(kv_caches), self.extra_config["broken"]
        if kind in COPIES:
            made.__class__ = COPIES[kind]
            return made
        submit = made.submit_load

        def submit_wrongly(job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            LOADS[kind](src_spec, dst_spec)
            return bool(submit(job_id, src_spec, dst_spec))

        made.submit_load = submit_wrongly
        return made
