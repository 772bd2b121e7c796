"""Verbs that clear an engine's caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dynamo_vllm.admin.base import Body
from dynamo_vllm.engine.base import ResetCache

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
