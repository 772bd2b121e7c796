"""Puts small models beside others where there are fewer GPUs than workers. Pure, like the plan.

A pooling or transcription model often needs a twentieth of a GPU. vLLM would take 92 % for each.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import model_kind
from dynamo_vllm.config.engine_rules import CACHE_SIZE_ARGUMENTS
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing.gpus import GIB
from dynamo_vllm.sizing.memory import UTILISATION
from dynamo_vllm.supervise.planning.gpu_pool import VARIABLE, share_of
from dynamo_vllm.supervise.planning.workers import parse_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.topology import Topology, WorkerGroup
    from dynamo_vllm.config.worker_plan import WorkerPlan

BESIDE_WEIGHTS = 3 * GIB
"""For the CUDA context, activations, and the small KV cache that a pooling model of the decoder kind has."""
LEAST_SHARE = 0.05
LEAST_FOR_OTHERS = 0.4
"""What must be left of a GPU for a model that generates."""
_FLAG = "--gpu-memory-utilization"


@dataclass(frozen=True, slots=True)
class _Group:
    group: WorkerGroup
    plan: WorkerPlan
    share: float | None
    """Of a GPU, for a model that can stand beside others; None for all others."""

    @property
    def engines(self) -> int:
        """GPUs that it needs in all, unless it names its own."""
        is_fake = self.plan.options.engine == "fake"
        return 0 if is_fake or VARIABLE in self.group.env else self.group.count * self.plan.node.engines

    @property
    def name(self) -> str:
        options = self.plan.options
        return (options.served_model_name or (str(options.model),))[0]


def put_in(
    wanted: Topology, environment: Mapping[str, str], gpus: Sequence[str], gpu_bytes: int | None
) -> tuple[Topology, str | None]:
    """Return the topology with a GPU for each worker, and what to say of it; unchanged if there are enough.

    `gpu_bytes` is the memory of the smallest GPU; without it nothing is shared.
    """
    named = {gpu for group in wanted.workers for gpu in group.env.get(VARIABLE, "").split(",")}
    gpus = [gpu for gpu in gpus if gpu not in named]
    found = [_read(wanted, group, environment, gpu_bytes) for group in wanted.workers]
    small = [one for one in found if one.share is not None and one.engines]
    large = sum(one.engines for one in found if one.share is None)
    needed = large + sum(one.engines for one in small)
    if not gpus or not small or needed <= len(gpus) or large > len(gpus):
        return wanted, None
    places = _places(small, gpus, large)
    taken: defaultdict[str, float] = defaultdict(float)
    for one in small:
        taken[places[id(one)]] += one.group.count * (one.share or 0.0)
    groups: list[WorkerGroup] = []
    left = list(gpus)
    for one in found:
        if id(one) in places:
            groups.append(_on(one.group, (places[id(one)],), one.share))
        elif not one.engines:
            groups.append(one.group)
        else:
            width = one.plan.node.engines
            for _ in range(one.group.count):
                mine, left = left[:width], left[width:]
                groups.append(_on(dataclasses.replace(one.group, count=1), mine, _rest(one, mine, taken)))
    said = ", ".join(f"{one.name} {one.share:.0%} of GPU {places[id(one)]}" for one in small)
    return dataclasses.replace(wanted, workers=tuple(groups)), (
        f"there are fewer GPUs than workers, so small models share: {said} ({_FLAG} under a group's args "
        "changes that)"
    )


def _read(
    wanted: Topology, group: WorkerGroup, environment: Mapping[str, str], gpu_bytes: int | None
) -> _Group:
    values = {"model": wanted.model} if wanted.model is not None else {}
    plan = parse_group({**values, **group.options}, group, {**environment, **group.env})
    options = plan.options
    is_small = options.card.kind != model_kind.GENERATE and not options.omni and plan.node.engines == 1
    share = None
    if is_small and "gpu_memory_utilization" in plan.flags:
        share = share_of(plan.flags)
    elif is_small and not CACHE_SIZE_ARGUMENTS & plan.flags.keys() and gpu_bytes:
        weights = weight_bytes(Path(str(options.model)))
        if weights is not None:
            share = max(LEAST_SHARE, math.ceil(100 * (weights + BESIDE_WEIGHTS) / gpu_bytes) / 100)
    return _Group(group, plan, share)


def weight_bytes(folder: Path) -> int | None:
    """Return the size of a model's weights on disk; None for one that is not there."""
    for pattern in ("*.safetensors", "*.bin"):
        if found := list(folder.glob(pattern)):
            return sum(path.stat().st_size for path in found)
    return None


def _places(small: Sequence[_Group], gpus: Sequence[str], large: int) -> dict[int, str]:
    """Return the GPU of each small group: one that no other needs, else that of the last other worker."""
    hosts = list(gpus[large:]) or list(gpus[large - 1 : large])
    return {id(one): hosts[number % len(hosts)] for number, one in enumerate(small)}


def _rest(one: _Group, mine: Sequence[str], taken: Mapping[str, float]) -> float | None:
    """Return what small models leave on the GPUs of a worker; None if they do not matter to it."""
    beside = max((taken.get(gpu, 0.0) for gpu in mine), default=0.0)
    if not beside or CACHE_SIZE_ARGUMENTS & one.plan.flags.keys() or one.plan.options.omni:
        return None
    rest = round(UTILISATION - beside, 2)
    if rest < LEAST_FOR_OTHERS:
        raise ConfigError(
            f"small models would leave {rest:.0%} of GPU {','.join(mine)} for {one.name}; start fewer, give "
            f"more GPUs, or say how much each takes with {_FLAG} under its group's args"
        )
    return rest


def _on(group: WorkerGroup, gpus: Sequence[str], share: float | None) -> WorkerGroup:
    has_share = any(word.split("=")[0] == _FLAG for word in group.args)
    args = group.args if share is None or has_share else (*group.args, _FLAG, f"{share:g}")
    return dataclasses.replace(group, args=args, env={VARIABLE: ",".join(gpus), **group.env})
