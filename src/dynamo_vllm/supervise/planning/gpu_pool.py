"""Assigns the machine's GPUs to workers. Pure, like the plan that uses it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dynamo_vllm.config.engine_rules import CACHE_SIZE_ARGUMENTS
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing.memory import UTILISATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.config.rules.flags import EngineFlags

VARIABLE = "CUDA_VISIBLE_DEVICES"
_SHARE = "gpu_memory_utilization"


class GpuPool:
    """Each worker gets its own GPUs; workers that name theirs may share if the memory suffices."""

    def __init__(self, there: Sequence[str]) -> None:
        self._there = list(there)
        self._free = list(there)
        self._count = len(there)
        self._shares: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """The share of each GPU's memory, by worker."""
        self._taken: dict[str, list[str]] = {}
        """The GPUs that were taken out of the free ones, by worker."""

    def assign(self, name: str, named: str | None, engines: int, share: float) -> dict[str, str]:
        """Return what a worker's environment needs besides what the user `named` there."""
        if not self._count or not engines:
            return {}
        if named is not None:
            mine = named.split(",")
        elif len(self._free) < engines:
            raise ConfigError(
                f"there are not enough GPUs: {name} needs {engines}, {len(self._free)} of {self._count} are "
                f"left; start fewer workers, or let groups of a --config file share with 'env: {{{VARIABLE}: "
                '"0"}\' and a lower --gpu-memory-utilization'
            )
        else:
            mine = self._free[:engines]
        self._take(name, mine)
        for gpu in mine[:engines]:  # vLLM uses the first of those it sees
            self._shares[gpu][name] = share
            self._refuse_too_much(gpu)
        return {} if named is not None else {VARIABLE: ",".join(mine)}

    def occupy(self, name: str, named: str | None, engines: int, share: float) -> None:
        """Note the GPUs of a worker that is not told which to use: the first ones, or those `named`."""
        if self._count and engines:
            mine = self._free[:engines] if named is None else named.split(",")
            self._take(name, mine)
            for gpu in mine[:engines]:
                self._shares[gpu][name] = share

    def release(self, name: str) -> None:
        """Take back the GPUs of a worker, unless others have named them too."""
        for shares in self._shares.values():
            shares.pop(name, None)
        returned = self._taken.pop(name, [])
        still = {gpu for taken in self._taken.values() for gpu in taken}
        free = {*self._free, *returned} - still
        self._free = [gpu for gpu in self._there if gpu in free]

    def _take(self, name: str, mine: Sequence[str]) -> None:
        self._taken[name] = list(mine)
        self._free = [gpu for gpu in self._free if gpu not in mine]

    def _refuse_too_much(self, gpu: str) -> None:
        """vLLM would notice worker by worker, at the end of a long start."""
        shares = self._shares[gpu]
        if len(shares) > 1 and (percent := round(100 * sum(shares.values()))) > 100:
            raise ConfigError(
                f"{' and '.join(shares)} would take {percent} % of the memory of GPU {gpu}; give their "
                "groups a lower --gpu-memory-utilization, or separate GPUs"
            )


def share_of(engine: EngineFlags) -> float:
    """Return the share of a GPU's memory that an engine with these flags takes; 0 if they assign a
    size instead.
    """
    if (CACHE_SIZE_ARGUMENTS - {_SHARE}) & engine.keys():
        return 0.0
    try:
        return float(engine.get(_SHARE) or UTILISATION)
    except ValueError:  # vLLM will refuse it
        return 0.0
