"""Names groups of workers, for commands such as `scale`. Pure, like the plan."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING

from dynamo_vllm.supervise.planning.workers import parse_group

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.topology import Topology, WorkerGroup

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def named(wanted: Topology, environment: Mapping[str, str]) -> Topology:
    """Return the topology with a name for every group; a name in the file stays.

    A group is called as its processes are (worker, prefill, decode, encode). Where several groups would have
    that name, it is the model's.
    """
    if all(group.name is not None for group in wanted.workers):
        return wanted
    options = [_options(wanted, group, environment) for group in wanted.workers]
    unnamed = [at for at, group in enumerate(wanted.workers) if group.name is None]
    kinds = Counter(options[at].card.process_name for at in unnamed)
    taken = {group.name for group in wanted.workers if group.name is not None}
    groups = list(wanted.workers)
    for at in unnamed:
        kind = options[at].card.process_name
        base = kind if kinds[kind] == 1 else _of_model(options[at], kind)
        numbered = itertools.chain((base,), (f"{base}.{number}" for number in itertools.count(2)))
        name = next(name for name in numbered if name not in taken)
        taken.add(name)
        groups[at] = dataclasses.replace(groups[at], name=name)
    return dataclasses.replace(wanted, workers=tuple(groups))


def _options(wanted: Topology, group: WorkerGroup, environment: Mapping[str, str]) -> WorkerOptions:
    values = {} if wanted.model is None else {"model": wanted.model}
    return parse_group({**values, **group.options}, group, {**environment, **group.env}).options


def _of_model(options: WorkerOptions, kind: str) -> str:
    """Return the name of the model in one word, after that of the role if it is a special one."""
    served = (options.served_model_name or (PurePath(str(options.model)).name,))[0]
    model = _NOT_IN_A_NAME.sub("-", served).strip("-.") or "model"
    return model if kind == "worker" else f"{kind}-{model}"
