"""Tiers whose copies are done as late as vLLM allows, in any order, as a GPU may do them.

A CPU engine copies at once, which hides what vLLM's scheduler may get wrong: a block that is used again
before it was stored, a request that runs before its blocks are loaded.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.tiers.host_copies import HostCopies
from dynamo_vllm.engine.tiers.spec import Tiers

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_STEPS = 4
"""The number of steps that a copy takes at most."""


class LateCopies(HostCopies):
    """Keeps jobs until vLLM waits for them, or for some steps."""

    _chance: random.Random
    _kept: dict[int, tuple[int, Callable[[], bool]]]

    def begin(self) -> None:
        self._chance, self._kept = random.Random(3), {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._keep(job_id, lambda: super(LateCopies, self).submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._keep(job_id, lambda: super(LateCopies, self).submit_load(job_id, src_spec, dst_spec))

    def _keep(self, job_id: int, copy: Callable[[], bool]) -> bool:
        self._kept[job_id] = self._chance.randrange(MAX_STEPS), copy
        return True

    def get_finished(self) -> list[Any]:
        due = [job_id for job_id, (steps, _) in self._kept.items() if not steps]
        self._kept = {job_id: (max(steps - 1, 0), copy) for job_id, (steps, copy) in self._kept.items()}
        self._chance.shuffle(due)
        self.wait(set(due))
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._kept.keys():
            self._kept.pop(job_id)[1]()


class LateTiers(Tiers):
    """The tiers of a CPU engine with late copies."""

    def get_worker(self, kv_caches: Any) -> Any:
        made = super().get_worker(kv_caches)
        if type(made) is not HostCopies:
            raise TypeError("only a CPU engine has these copies")
        made.__class__ = LateCopies
        made.begin()
        return made
