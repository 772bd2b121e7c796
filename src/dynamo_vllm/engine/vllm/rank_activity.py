"""Reads the vitals of each rank that vLLM runs on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.process import activity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.engine.vllm.names import Llm


def read(llm: Llm) -> dict[int, Vitals]:
    """Returns the vitals by rank, without ranks on other nodes and those that Ray started."""
    config = llm.vllm_config
    cores = getattr(llm.engine_core.resources.engine_manager, "processes", ())
    found = {}
    for place, (rank, core) in enumerate(zip(llm.engine_core.engine_ranks_managed, cores, strict=False)):
        seen = activity.of_process(core.pid)
        if seen is not None:
            shards = config.parallel_config.local_world_size
            computes = any_gpu_computes(range(place * shards, (place + 1) * shards))
            found[rank] = seen._replace(is_active=seen.is_active or computes)
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        # Each step waits for all ranks: while one is slow, the others are idle but do not hang.
        found = dict.fromkeys(found, activity.combined(found.values()))
    return found


def any_gpu_computes(devices: Iterable[int]) -> bool:
    """Returns whether any process computes on one of these devices; False if NVML does not report it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return False
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    try:
        return any(utilisation(nvml, current_platform, device) > 0 for device in devices)
    finally:
        nvml.nvmlShutdown()


def utilisation(nvml: Any, platform: Any, device: int) -> int:
    """Returns the recent utilisation of a device in per cent; 0 if unknown, as for a MIG instance."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(platform.device_id_to_physical_device_id(device))
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except (nvml.NVMLError, ValueError, IndexError):
        return 0
