"""Verbs for LoRA adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dynamo_vllm.admin.base import Body
from dynamo_vllm.errors import WrongState

if TYPE_CHECKING:
    from dynamo_vllm.admin.base import Controls, Nothing, Reply
    from dynamo_vllm.lora.registry import Registry
    from dynamo_vllm.lora.slots import AdapterEntry


class AdapterSource(Body, frozen=True):
    uri: str
    """A folder, file://, hf://owner/name[@revision] or s3://bucket/prefix."""


class LoadBody(Body, frozen=True):
    lora_name: str
    source: AdapterSource


class UnloadBody(Body, frozen=True):
    lora_name: str


async def load_lora(body: LoadBody, worker: Controls) -> Reply:
    began = time.monotonic()
    entry = await registry(worker).load(body.lora_name, body.source.uri)
    return {
        "lora_name": entry.name,
        "lora_id": entry.id,
        "already_loaded": entry.already_loaded,
        "seconds": round(time.monotonic() - began, 3),
        **described(entry),
    }


async def unload_lora(body: UnloadBody, worker: Controls) -> Reply:
    await registry(worker).unload(body.lora_name)
    return {"lora_name": body.lora_name}


async def list_loras(_: Nothing, worker: Controls) -> Reply:
    entries = [] if worker.adapters is None else worker.adapters.entries()
    limits = worker.facts.adapters
    return {
        "loras": [{"name": entry.name, "id": entry.id, **described(entry)} for entry in entries],
        "count": len(entries),
        "capacity": limits.capacity if limits else 0,
    }


def registry(worker: Controls) -> Registry:
    if worker.adapters is None:
        raise WrongState("LoRA is off; start the worker with --enable-lora or DYN_LORA_ENABLED=1")
    return worker.adapters


def described(entry: AdapterEntry) -> Reply:
    """What an operator sees of an adapter."""
    facts = entry.facts
    return {
        "state": entry.state.value,
        "uri": entry.uri,
        "leases": entry.leases,
        "rank": facts.rank if facts else None,
        "bytes": facts.bytes if facts else None,
        "done_bytes": entry.done_bytes,
        "total_bytes": entry.total_bytes,
        "error": entry.error,
    }
