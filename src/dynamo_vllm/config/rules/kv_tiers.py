"""Rules for tiers of KV caches in host memory and on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dynamo_vllm import host_memory
from dynamo_vllm.config import nodes, private
from dynamo_vllm.config.options.kv_cache import OFFLOAD_GB, OWN_FOLDER
from dynamo_vllm.config.rules import connectors
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.options.kv_cache import DiskSpace
    from dynamo_vllm.config.rules.flags import EngineFlags

GB = 10**9
LOOK_SECONDS = 10.0
"""How long a look at a disk may take."""
_Found = TypeVar("_Found")
_CONTAINER_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""The files with a container's memory limit, for cgroups v2 and v1."""


def disk_is_a_folder_and_a_size(o: WorkerOptions, _: EngineFlags) -> None:
    if o.kv_offload_disk is not None and o.kv_disk is None:
        raise ConfigError(
            f"--kv-offload-disk {o.kv_offload_disk} is not PATH:GB, a folder and a size above 0; write it "
            "like /mnt/kv:500"
        )


def host_memory_is_a_size(o: WorkerOptions, _: EngineFlags) -> None:
    if o.kv_offload_gb is not None and not 0 < o.kv_offload_gb < float("inf"):
        raise ConfigError(f"--kv-offload-gb {o.kv_offload_gb:g} is not a size; use a number above 0")


def tiers_are_of_roles_that_keep_caches(o: WorkerOptions, _: EngineFlags) -> None:
    named = [*o.kv_tier_flags, *(["--connector offload"] if "offload" in o.connector else [])]
    if named and (o.omni or not o.card.keeps_kv):
        what = "--omni" if o.omni else f"a worker of the role {o.role}"
        raise ConfigError(
            f"{named[0]} cannot be combined with {what}, which has no KV caches to keep; leave it out"
        )


def tiers_have_a_connector(o: WorkerOptions, engine: EngineFlags) -> None:
    if not o.kv_tier_flags:
        return
    if {"none", "null"} & set(o.connector):
        raise ConfigError(
            f"{o.kv_tier_flags[0]} needs a connector, and --connector {o.connector[0]} names none; leave one "
            "of them out"
        )
    named = connectors.named_connectors(o, engine)
    others = [name for name in connectors.OFFLOADERS if name in named and name != "offload"]
    if others and o.kv_offload_disk is not None:
        raise ConfigError(
            f"--kv-offload-disk {o.kv_offload_disk} cannot be combined with the connector {others[0]}, which "
            f"has settings of its own for disks; leave {others[0]} out, or this option"
        )
    if "kv_transfer_config" in engine and not others:
        raise ConfigError(
            f"{o.kv_tier_flags[0]} cannot be combined with --kv-transfer-config, which describes all "
            "connectors; give one of them"
        )


def one_size_of_host_memory(o: WorkerOptions, engine: EngineFlags) -> None:
    """vLLM's own option would replace the connector that we name by OffloadingConnector, in silence."""
    if "kv_offloading_size" in engine and set(o.connector) - {"none", "null"}:
        raise ConfigError(
            f"--kv-offloading-size cannot be combined with --connector {' '.join(o.connector)}; leave it out "
            "and give --kv-offload-gb, which does the same"
        )


def tiers_need_prefix_caching(o: WorkerOptions, engine: EngineFlags) -> None:
    """vLLM would still look prompts up in the tiers, but not in its own cache in front of them."""
    if "offload" in o.connector and "no_enable_prefix_caching" in engine:
        raise ConfigError(
            "--no-enable-prefix-caching cannot be combined with the connector offload: a tier keeps what "
            "leaves the prefix cache; leave one of them out"
        )


def tiers_stay_on_one_machine(o: WorkerOptions, engine: EngineFlags) -> None:
    """One scheduler keeps account of one piece of shared memory; shards elsewhere would have another."""
    node = nodes.from_flags(o.headless, engine)
    if "offload" in o.connector and node.nodes_per_rank > 1:
        raise ConfigError(
            f"the connector offload cannot serve an engine over {node.nodes_per_rank} nodes; put all shards "
            "of an engine on one node (--data-parallel-size may span nodes), or leave the tiers out"
        )


def tier_fits_memory(o: WorkerOptions, _: EngineFlags) -> None:
    if o.kv_offload_gb is not None and o.engine != "fake":
        refuse_more_than_memory(o.kv_offload_gb, f"--kv-offload-gb {o.kv_offload_gb:g}")


def tier_fits_shared_memory(o: WorkerOptions, _: EngineFlags) -> None:
    if "offload" in o.connector and o.engine != "fake":
        gb = o.kv_offload_gb or OFFLOAD_GB
        refuse_more_than_shared_memory(gb, f"--kv-offload-gb {gb:g}")


def disk_is_no_file(o: WorkerOptions, _: EngineFlags) -> None:
    """Refuses what is a mistake whatever the state of the disk is."""
    disk = o.kv_disk
    if disk is None or o.engine == "fake":
        return
    with contextlib.suppress(OSError):
        there, is_folder = _looked(lambda: ((found := _nearest(disk)), found.is_dir()))
        if not is_folder:
            raise ConfigError(f"--kv-offload-disk {disk}: {there} is not a folder; name one")


def tier_fits_disk(o: WorkerOptions, _: EngineFlags) -> None:
    if o.kv_disk is not None and o.engine != "fake":
        refuse_unusable_folder(o.kv_disk)


# --- what this machine has ------------------------------------------------------------------------------


def refuse_more_than_memory(gb: float, asked: str) -> None:
    has_gb = memory_bytes() / GB
    if gb >= has_gb:
        raise ConfigError(
            f"{asked} does not fit into this machine's memory; use a number above 0 and below {has_gb:.0f}"
        )


def refuse_more_than_shared_memory(gb: float, asked: str) -> None:
    """vLLM would notice when it has loaded the model; a container has 64 MB by default.

    What killed engines left there is removed first, so that they can be started again.
    """
    host_memory.sweep()
    place, free_gb = host_memory.FOLDER, shared_memory_bytes() / GB
    if gb > free_gb:
        raise ConfigError(
            f"{asked} does not fit into {place}, where vLLM keeps it and {free_gb:.1f} GB are free; "
            f"use less, or give more shared memory: docker run --shm-size={gb + 1:.0f}g, in Kubernetes an "
            f"emptyDir with 'medium: Memory' at {place}, elsewhere mount -o remount,size= as root"
        )


def refuse_unusable_folder(disk: DiskSpace) -> None:
    """Nothing is created here."""
    if said := _told(disk, _trouble):
        raise ConfigError(said)


def disk_warning(disk: DiskSpace) -> str | None:
    """Return what a worker says of a disk that it cannot use, or that has less room than it may take."""
    return _told(disk, lambda disk: _trouble(disk) or _shortage(disk))


def _told(disk: DiskSpace, look: Callable[[DiskSpace], str | None]) -> str | None:
    try:
        return _looked(lambda: look(disk))
    except OSError as exc:
        return f"--kv-offload-disk {disk}: {exc}; check that the disk is there, or name another folder"


def _looked(look: Callable[[], _Found]) -> _Found:
    """Look in a thread, which a lost server may keep for ever. Raises OSError, also after `LOOK_SECONDS`."""
    done: Future[_Found] = Future()

    def run() -> None:
        try:
            done.set_result(look())
        except Exception as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name="kv-disk-look", daemon=True).start()
    try:
        return done.result(LOOK_SECONDS)
    except TimeoutError as exc:
        raise TimeoutError(str(exc) or f"no answer for {LOOK_SECONDS:g} s") from None


def _trouble(disk: DiskSpace) -> str | None:
    """Return what keeps the disk from being used, and the fix."""
    there, own = _nearest(disk), _folder(disk) / OWN_FOLDER
    if not os.access(there, os.W_OK | os.X_OK):
        return (
            f"--kv-offload-disk {disk}: {there} cannot be written; name another folder, or change its rights"
        )
    if os.path.lexists(own) and not private.is_own_folder(own.lstat()):
        return (
            f"--kv-offload-disk {disk}: {own} may belong to another user; remove it, or name another folder"
        )
    has_gb = shutil.disk_usage(there).total / GB
    if disk.gb > has_gb:
        return f"--kv-offload-disk {disk} does not fit: the whole disk has {has_gb:.0f} GB; use less"
    return None


def _shortage(disk: DiskSpace) -> str | None:
    """Return a warning if the disk has less room now; None where caches of an earlier run may fill it."""
    there, folder = _nearest(disk), _folder(disk)
    free_gb = shutil.disk_usage(there).free / GB
    is_used = there == folder and any(folder.iterdir())
    if is_used or disk.gb <= free_gb:
        return None
    return (
        f"--kv-offload-disk {disk}: only {free_gb:.0f} GB are free there; when the disk is full, less is kept"
    )


def _folder(disk: DiskSpace) -> Path:
    return Path(disk.path).expanduser().absolute()


def _nearest(disk: DiskSpace) -> Path:
    """Return the folder, or the one above it that exists."""
    folder = _folder(disk)
    return next(place for place in (folder, *folder.parents) if place.exists())


def memory_bytes(cgroup: str = "/sys/fs/cgroup") -> int:
    """Return the memory of this machine, or of this container if it has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not this version of cgroups, or no limit ("max")
            found = min(found, int(Path(cgroup, name).read_text()))
    return found


def shared_memory_bytes() -> int:
    """Return how much of it is free."""
    try:
        return shutil.disk_usage(host_memory.FOLDER).free
    except OSError:
        return 0


RULES = (
    disk_is_a_folder_and_a_size,
    host_memory_is_a_size,
    tiers_are_of_roles_that_keep_caches,
    tiers_have_a_connector,
    one_size_of_host_memory,
    tiers_need_prefix_caching,
    tiers_stay_on_one_machine,
    tier_fits_memory,
    tier_fits_shared_memory,
    disk_is_no_file,
    tier_fits_disk,
)
STATES = (tier_fits_disk,)
"""What a worker can do without when it starts again: it computes, and tries the disk again and again."""
