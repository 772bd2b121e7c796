"""Sets the environment variables of vLLM and its processes."""

from __future__ import annotations

import os
import tempfile
from importlib import metadata
from typing import TYPE_CHECKING

from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.engine.machine import device
from dynamo_vllm.engine.process import cpu_threads
from dynamo_vllm.engine.process.parent import PARENT_VARIABLE, end_with_parent
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.engine.settings import EngineSettings

NIXL_PAUSE_VARIABLE = "DYN_VLLM_NIXL_PAUSE_US"
OMNI_VARIABLE = "DYN_VLLM_OMNI_STAGES"
"""Is set for the processes of a vLLM-Omni pipeline."""
MULTIPROC_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
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
"""The kernel's limit for the path of a socket, minus the name that vLLM gives it."""


def cache_environment() -> None:
    """Has vLLM cache its environment variables, which it otherwise looks up for every token.

    vLLM 0.30 does this in its engine cores, but not in the process that starts them.
    """
    from vllm.envs import enable_envs_cache

    enable_envs_cache()


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for every process that imports vLLM, without those that the user set."""
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if (names := plugins(with_omni=False)) is not None:
        wanted["VLLM_PLUGINS"] = ",".join(names)
    if device() == "cpu":
        # Workers may share a machine; vLLM would pin all of them to the same cores.
        wanted[cpu_threads.BIND] = "nobind"
        wanted |= cpu_threads.cpu_thread_environment(environment)
        wanted["ONEDNN_JIT_PROFILE"] = "0"  # otherwise every process leaves a perf-PID.map in /tmp
        wanted["THP_MEM_ALLOC_ENABLE"] = "1"  # huge pages for torch: half the time to zero the KV cache
        wanted["UCX_RCACHE_MAX_UNRELEASED"] = "1024"  # vLLM sets this too, but our plugin loads NIXL first
    else:
        # Otherwise torch initialises the driver to look for a GPU, and forked processes cannot use the GPU.
        wanted["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return {name: value for name, value in wanted.items() if name not in environment}


def socket_folder(scratch: str) -> str:
    """Returns the folder for vLLM's sockets: the worker's own one, or that of all temporary files."""
    temporary = tempfile.gettempdir()
    for folder in (scratch, temporary):
        if len(os.fsencode(folder)) <= _SOCKET_FOLDER_LENGTH:
            return folder
    raise StartError(
        f"the path of the temporary folder, {temporary}, is too long for sockets; "
        f"set TMPDIR to one of at most {_SOCKET_FOLDER_LENGTH} characters"
    )


def set_environment(settings: EngineSettings) -> None:
    """Sets vLLM's variables in this worker, except those that the user set."""
    wanted = {**import_environment(settings.environment), MULTIPROC_METHOD: "spawn"}
    if "VLLM_RPC_BASE_PATH" not in settings.environment:  # by default it leaves its sockets in /tmp
        wanted["VLLM_RPC_BASE_PATH"] = socket_folder(settings.scratch_folder)
    if settings.bind_host:
        wanted["VLLM_HOST_IP"] = settings.bind_host
    if device() == "cpu":
        wanted[NIXL_PAUSE_VARIABLE] = "1000"
    if settings.side_channel_host:
        wanted["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.side_channel_host
    if settings.side_channel_host in LOOPBACK_HOSTS:
        # By default NIXL's network transport listens on every device. Shared memory and GPU links still work.
        wanted["UCX_NET_DEVICES"] = "lo"
    if settings.omni and (names := plugins(with_omni=True)) is not None:
        wanted["VLLM_PLUGINS"] = ",".join(names)
    if settings.lora:
        wanted["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    wanted |= settings.connector_environment
    for name, value in wanted.items():
        if name not in settings.environment:
            os.environ[name] = value
    if settings.prometheus_folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = settings.prometheus_folder  # a part of what the user named
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.register_at_fork(after_in_child=end_with_parent)  # a forked process does not load the plugin again


def plugins(with_omni: bool) -> list[str] | None:
    """Returns the plugins that vLLM's processes may load; None means all of them.

    If vLLM-Omni is installed, its plugin replaces models and methods in every vLLM process. So workers
    without Omni must not load it.
    """
    found = {entry.name for group in _PLUGIN_GROUPS for entry in metadata.entry_points(group=group)}
    if _OMNI_PLUGIN not in found:
        return None
    return sorted(found if with_omni else found - {_OMNI_PLUGIN})
