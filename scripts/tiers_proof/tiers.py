"""Names the tiers and makes vLLM's settings for them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MANY, _FEW, _FEWER = 8, 2.3, 1.25
"""The size of a host tier that keeps everything, of one that keeps some requests, and of one that leaves most
to the disk: as multiples of the engine's own cache."""


def config(
    tier: str, blocks: int, bytes_per_block: int, folder: Path, flags: Mapping[str, Any], model: Path
) -> dict[str, Any]:
    """Returns vLLM's kv_transfer_config for a tier of `TIERS`, or for `broken:KIND`."""
    size = bytes_per_block * flags.get("tensor_parallel_size", 1)
    chunk = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    kind, _, broken = tier.partition(":")
    times, more = TIERS[kind]
    extra: dict[str, Any] = {
        "spec_name": "Tiers",
        "spec_module_path": "dynamo_vllm.engine.tiers.spec",
        "cpu_bytes_to_use": int(times * blocks) * chunk,
        "self_describing_kv_events": True,
        "packs_blocks": True,
        **more(folder, _model_identity(model, flags) if tier in ON_DISK else ""),
    }
    if broken:
        extra["broken"] = broken
    return {
        "kv_connector": "TierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _model_identity(model: Path, flags: Mapping[str, Any]) -> str:
    """Returns the name of the model's KV values, as a worker does."""
    from dynamo_vllm.kv import model_identity

    return model_identity.identity(
        str(model), {name: str(value) for name, value in flags.items()}, os.environ
    )


def _host(_folder: Path, _identity: str) -> Mapping[str, Any]:
    return {}


def _late(_folder: Path, _identity: str) -> Mapping[str, Any]:
    return {"spec_name": "LateTiers", "spec_module_path": "tiers_proof.late_copies"}


def _late_disk(folder: Path, identity: str) -> Mapping[str, Any]:
    return {**_late(folder, identity), **_disk(folder, identity)}


def _broken(_folder: Path, _identity: str) -> Mapping[str, Any]:
    return {"spec_name": "BrokenTiers", "spec_module_path": "tiers_proof.broken_copies"}


def _fs(folder: Path, _identity: str) -> Mapping[str, Any]:
    tier = {"type": "fs", "root_dir": str(folder / "fs"), "n_read_threads": 2, "n_write_threads": 2}
    return {"secondary_tiers": [tier]}


def _disk(folder: Path, identity: str) -> Mapping[str, Any]:
    tier = {
        "type": "DiskTier",
        "module_path": "dynamo_vllm.engine.tiers.disk_tier",
        "folder": str(folder / "disk"),
        "limit_bytes": 1 << 30,
        "identity": identity,
    }
    return {"secondary_tiers": [tier]}


TIERS = {
    "host": (_MANY, _host),
    "small-host": (_FEW, _host),
    "late-host": (_FEW, _late),
    "disk": (_FEWER, _disk),
    "late-disk": (_FEWER, _late_disk),
    "fs": (_FEWER, _fs),
    "broken": (_MANY, _broken),
}
"""By name: the size of host memory, and what else vLLM gets. `fs` is vLLM's own tier on disk."""
ON_DISK = ("disk", "late-disk", "fs")
