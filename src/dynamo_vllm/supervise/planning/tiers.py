"""Shares memory and disk for KV caches that leave the engines out over workers. Pure, like the plan.

A group's own sizes are those of each of its workers. The sizes of the command line, of the environment and of
the top of a file are for all workers together.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import build
from dynamo_vllm.config.options import FrontendOptions, WorkerOptions
from dynamo_vllm.config.options.kv_cache import OFFLOAD_GB, DiskSpace
from dynamo_vllm.config.rules import kv_tiers
from dynamo_vllm.config.rules.flags import flag
from dynamo_vllm.config.topology import TIERS
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.supervise.planning.workers import parse_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynamo_vllm.config.topology import Topology, Values, WorkerGroup
    from dynamo_vllm.config.worker_plan import WorkerPlan

VARIABLES = tuple(item.option.env for item in build.declared(WorkerOptions) if item.name in TIERS)


def share_out(wanted: Topology, environment: Mapping[str, str]) -> tuple[Topology, str | None]:
    """Return the topology with a part for each worker that keeps caches, and what to say of it."""
    whole = _whole(wanted.tiers, environment)
    if not whole:
        return wanted, None
    rest = without_variables(environment)
    front = build.from_values(FrontendOptions, wanted.frontend, rest)
    taking = [_takes_part(wanted, group, rest, front) for group in wanted.workers]
    groups = list(wanted.workers)
    said = []
    for name, value in whole.items():
        there = [at for at, takes in enumerate(taking) if takes and name not in groups[at].options]
        count = sum(groups[at].count for at in there)
        if not any(taking):
            raise ConfigError(
                f"{flag(name)} {value}: no worker keeps KV caches there; leave it out, or set it in a group"
            )
        for at in there:
            more = {name: _part(value, count)}
            groups[at] = dataclasses.replace(groups[at], options={**groups[at].options, **more})
        if count > 1:
            said.append(f"{flag(name)} {value} is {_part(value, count)} for each of {count} workers")
    return dataclasses.replace(wanted, workers=tuple(groups), tiers={}), "; ".join(said) or None


def without_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in VARIABLES}


def _whole(given: Values, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the sizes that are for all workers; raises ConfigError for one that is none."""
    options = build.from_values(
        WorkerOptions, given, {name: environment[name] for name in VARIABLES if name in environment}
    )
    kv_tiers.host_memory_is_a_size(options, {})
    kv_tiers.disk_is_a_folder_and_a_size(options, {})
    found = {"kv_offload_gb": options.kv_offload_gb, "kv_offload_disk": options.kv_disk}
    return {name: value for name, value in found.items() if value is not None}


def _part(value: float | DiskSpace, count: int) -> float | str:
    if isinstance(value, DiskSpace):
        return str(dataclasses.replace(value, gb=_share(value.gb, count)))
    return _share(value, count)


def _share(gb: float, count: int) -> float:
    """Return the part in whole megabytes, if it has some."""
    return math.floor(1000 * gb / count) / 1000 or gb / count


def _takes_part(
    wanted: Topology, group: WorkerGroup, environment: Mapping[str, str], front: FrontendOptions
) -> bool:
    """A decode worker gets prompts from others; it computes some if the router may leave them to it."""
    values = {} if wanted.model is None else {"model": wanted.model}
    plan = parse_group({**values, **group.options}, group, {**environment, **group.env})
    options = plan.options
    is_off = bool({"none", "null"} & set(options.connector)) or "kv_transfer_config" in plan.flags
    if options.omni or not options.card.keeps_kv or is_off:
        return False
    return (
        not options.card.takes_kv or "offload" in options.connector or front.local_prefill_tokens is not None
    )


def refuse_more_than_here(workers: Iterable[tuple[WorkerPlan, int]], new_gb: float | None = None) -> None:
    """Refuse what fits for each worker alone, but not for all of them; each comes with its number.

    `new_gb` is what is not in shared memory yet; None if no worker runs.
    """
    kept = [
        (plan.options, count)
        for plan, count in workers
        if "offload" in plan.options.connector and plan.options.engine != "fake"
    ]
    gb = sum(count * (options.kv_offload_gb or OFFLOAD_GB) for options, count in kept)
    if sum(count for _, count in kept) > 1:
        asked = f"{gb:g} GB of host memory for the KV caches of all workers (--kv-offload-gb)"
        kv_tiers.refuse_more_than_memory(gb, asked)
        kv_tiers.refuse_more_than_shared_memory(gb if new_gb is None else new_gb, asked)
    for disk in _together([(options.kv_disk, count) for options, count in kept]):
        kv_tiers.refuse_unusable_folder(disk)


def refuse_more_beside(worker: WorkerPlan, count: int, running: Iterable[tuple[WorkerPlan, int]]) -> None:
    """Refuse tiers of `count` more workers that do not fit beside those of the running ones."""
    options = worker.options
    if "offload" not in options.connector or options.engine == "fake":
        return
    refuse_more_than_here([*running, (worker, count)], count * (options.kv_offload_gb or OFFLOAD_GB))


def _together(disks: Sequence[tuple[DiskSpace | None, int]]) -> list[DiskSpace]:
    found: defaultdict[str, float] = defaultdict(float)
    for disk, count in disks:
        if disk is not None:
            found[disk.path] += count * disk.gb
    return [DiskSpace(path, gb) for path, gb in found.items()]
