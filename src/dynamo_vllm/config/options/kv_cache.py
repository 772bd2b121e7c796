"""Options of a worker for KV caches: connectors, transfer between workers, and KV events."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.requests import RequestOptions

OFFLOAD_GB = 5.0
"""Host memory for KV caches that leave an engine, unless the user sizes it."""
OWN_FOLDER = "dynamo-vllm-kv"
"""Ours, in the one that the user names for KV caches on disk."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A folder, and how much of its disk may be used."""

    path: str
    gb: float

    def __str__(self) -> str:
        return f"{self.path}:{self.gb:g}"


def disk_space(text: str) -> DiskSpace | None:
    """Read PATH:GB; None if it is something else."""
    path, _, size = text.rpartition(":")
    try:
        found = DiskSpace(path, float(size))
    except ValueError:
        return None
    return found if found.path and 0 < found.gb < float("inf") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheOptions(RequestOptions):
    """A process that keeps KV caches, transfers them, and publishes their events."""

    connector: tuple[str, ...] = opt(
        (),
        "kv cache",
        "KV connectors: nixl, offload, kvbm (which is being removed upstream), or none; lmcache is known but "
        "refused (default: none, nixl for a worker that hands its KV cache over or fetches one, and offload "
        "with --kv-offload-gb or --kv-offload-disk).",
        env="DYN_CONNECTOR",
        metavar="NAME",
    )
    local_prefill_tokens: int | None = opt(
        None,
        "kv cache",
        "A prefill worker passes prompts with fewer tokens than this on to the decode worker.",
        env="DYN_VLLM_LOCAL_PREFILL_TOKENS",
        metavar="TOKENS",
    )
    kv_lease_seconds: int = opt(
        30,
        "kv cache",
        "How long a prefill worker keeps a KV cache that no decode worker fetches.",
        env="DYN_VLLM_KV_LEASE_SECONDS",
        metavar="SECONDS",
    )
    kv_offload_gb: float | None = opt(
        None,
        "kv cache",
        "Host memory in GB for KV caches that leave the engine, of all ranks of a worker on its machine; of "
        "all workers together if 'serve' gets it (default: none, and 5 for each worker with --connector "
        "offload or --kv-offload-disk).",
        env="DYN_VLLM_KV_OFFLOAD_GB",
        metavar="GB",
    )
    kv_offload_disk: str | None = opt(
        None,
        "kv cache",
        "Folder and size in GB for KV caches that leave the host memory too, such as /mnt/kv:500; shared out "
        "like --kv-offload-gb. A restarted worker finds them again.",
        env="DYN_VLLM_KV_OFFLOAD_DISK",
        metavar="PATH:GB",
    )
    side_channel_host: str | None = opt(
        None,
        "kv cache",
        "Address where other engines request KV cache transfers (default: --bind-host, or the machine's "
        "address).",
        env="VLLM_NIXL_SIDE_CHANNEL_HOST",
        metavar="ADDRESS",
    )
    side_channel_port: int | None = opt(
        None,
        "kv cache",
        "First port of --side-channel-host, one per data-parallel rank (default: free ports).",
        env="VLLM_NIXL_SIDE_CHANNEL_PORT",
        metavar="PORT",
    )
    kv_events: bool | None = opt(
        None,
        "kv cache",
        "Publish KV events for the router (default: on when prefix caching is).",
        env="DYN_VLLM_KV_EVENTS",
    )
    kv_event_port: int | None = opt(
        None,
        "kv cache",
        "First port of KV events, one per data-parallel rank (default: a local socket or free ports).",
        env="DYN_VLLM_KV_EVENT_PORT",
        metavar="PORT",
    )
    enable_local_indexer: bool = opt(
        True, "kv cache", "Keep an index of this worker's KV blocks in the worker.", env="DYN_LOCAL_INDEXER"
    )

    @property
    def kv_disk(self) -> DiskSpace | None:
        """None also for one that a rule refuses."""
        return None if self.kv_offload_disk is None else disk_space(self.kv_offload_disk)

    @property
    def kv_tier_flags(self) -> tuple[str, ...]:
        """The options that size tiers of KV caches, as the user gave them."""
        given = {"--kv-offload-gb": self.kv_offload_gb, "--kv-offload-disk": self.kv_offload_disk}
        return tuple(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in given.items()
            if value is not None
        )
