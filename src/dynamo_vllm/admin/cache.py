"""Verbs that clear an engine's caches, and that prove its tiers of KV caches."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from dynamo_vllm.admin.base import Body
from dynamo_vllm.engine.base import ResetCache
from dynamo_vllm.errors import WrongState

if TYPE_CHECKING:
    from dynamo_vllm.admin.base import Controls, Nothing, Reply

Kind = Literal["prefix", "multimodal", "encoder"]


class ResetBody(Body, frozen=True):
    kinds: tuple[Kind, ...] = ("prefix", "multimodal", "encoder")


async def clear_kv_blocks(_: Nothing, worker: Controls) -> Reply:
    await worker.engine.control(ResetCache(frozenset({"prefix"})))
    return {"kinds": ["prefix"]}


async def reset_caches(body: ResetBody, worker: Controls) -> Reply:
    await worker.engine.control(ResetCache(frozenset(body.kinds)))
    return {"kinds": list(body.kinds)}


async def prove_tiers(_: Nothing, worker: Controls) -> Reply:
    if worker.tiers is None:
        raise WrongState("this worker has no tiers of KV caches; start it with --kv-offload-gb")
    first = worker.facts.data_parallel_start_rank
    ranks = range(first, first + worker.facts.data_parallel_size)
    return {"ranks": [asdict(await worker.tiers.prove(rank)) for rank in ranks]}
