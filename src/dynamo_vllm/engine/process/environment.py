"""Sets the environment variables of vLLM and its processes."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.engine.machine import device
from dynamo_vllm.engine.process import cpu_threads
from dynamo_vllm.engine.process.parent import PARENT_VARIABLE, end_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.engine.settings import EngineSettings

NIXL_PAUSE_VARIABLE = "DYN_VLLM_NIXL_PAUSE_US"
OMNI_VARIABLE = "DYN_VLLM_OMNI_STAGES"
"""Set for the processes of a pipeline of vLLM-Omni."""
WAY_OF_PROCESSES = "VLLM_WORKER_MULTIPROC_METHOD"
_OMNI_PLUGIN = "vllm_omni_register_models"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
    "vllm_omni.general_plugins",
    "vllm_omni.platform_plugins",
)
_SOCKET_FOLDER_LENGTH = 107 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""What the kernel takes as the path of a socket, without the name that vLLM gives it."""


def keep_environment() -> None:
    """Once started, vLLM need not look its variables up again: it does so for every token.

    vLLM has its engine processes do this, not the one that made them.
    """
    from vllm.envs import enable_envs_cache

    enable_envs_cache()


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for every process that imports vLLM, whatever it then does. What the user set stands."""
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if (names := plugins(with_omni=False)) is not None:
        wanted["VLLM_PLUGINS"] = ",".join(names)
    if device() == "cpu":
        # Several workers share a machine; pinning each to the same cores would starve them.
        wanted[cpu_threads.BIND] = "nobind"
        wanted |= cpu_threads.cpu_thread_environment(environment)
        wanted["ONEDNN_JIT_PROFILE"] = "0"  # else every process leaves a perf-PID.map in /tmp
        wanted["THP_MEM_ALLOC_ENABLE"] = "1"  # huge pages for torch: half the time to zero the KV cache
        wanted["UCX_RCACHE_MAX_UNRELEASED"] = "1024"  # as vLLM would; our plugin loads NIXL before it
    else:
        # Otherwise torch asks the driver whether there is a GPU, and no forked process can use one then.
        wanted["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return {name: value for name, value in wanted.items() if name not in environment}


def set_environment(settings: EngineSettings) -> None:
    """vLLM's variables for this worker. What the user set stands."""
    wanted = {**import_environment(settings.environment), WAY_OF_PROCESSES: "spawn"}
    if len(settings.scratch_folder) <= _SOCKET_FOLDER_LENGTH:
        wanted["VLLM_RPC_BASE_PATH"] = settings.scratch_folder  # by itself it leaves its sockets in /tmp
    if settings.bind_host:
        wanted["VLLM_HOST_IP"] = settings.bind_host
    if device() == "cpu":
        wanted[NIXL_PAUSE_VARIABLE] = "1000"
    if settings.prometheus_folder:
        wanted["PROMETHEUS_MULTIPROC_DIR"] = settings.prometheus_folder
    if settings.side_channel_host:
        wanted["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.side_channel_host
    if settings.side_channel_host in LOOPBACK_HOSTS:
        # NIXL's network transport listens on every device; shared memory and GPU links are none.
        wanted["UCX_NET_DEVICES"] = "lo"
    if settings.omni and (names := plugins(with_omni=True)) is not None:
        wanted["VLLM_PLUGINS"] = ",".join(names)
    if settings.lora:
        wanted["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    wanted |= settings.connector_environment
    for name, value in wanted.items():
        if name not in settings.environment:
            os.environ[name] = value
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.register_at_fork(after_in_child=end_with_parent)  # a forked process does not load the plugin again


def plugins(with_omni: bool) -> list[str] | None:
    """What vLLM's processes may load; None is everything, and right where vLLM-Omni is not installed.

    vLLM-Omni enters every process of vLLM in its environment and replaces models and methods there.
    """
    found = {entry.name for group in _PLUGIN_GROUPS for entry in metadata.entry_points(group=group)}
    if _OMNI_PLUGIN not in found:
        return None
    return sorted(found if with_omni else found - {_OMNI_PLUGIN})
