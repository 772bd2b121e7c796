"""Decides whether a worker's processes may be forked from one that has imported vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import WorkerOptions

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_DIFFERS = ("DYN_",)
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES",)


def why_not_forked(options: WorkerOptions, environment: Mapping[str, str]) -> str | None:
    """Return why each process of this worker starts from scratch and imports vLLM itself; None if
    it need not.
    """
    if options.engine != "vllm":
        return "it does not run vLLM"
    if not options.fork:
        return "--no-fork"
    if options.omni:
        return "vLLM-Omni starts the processes of its stages itself"
    if environment.get(METHOD) == "spawn":
        return f"{METHOD}=spawn"
    if environment.get(_BIND, "nobind") != "nobind":
        return f"{_BIND}: vLLM binds threads while a program starts"
    return None


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be equal in processes that share their imports.

    Libraries read many of theirs at import; ours, and the GPU of a worker, matter later.
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_DIFFERS) and name not in _MAY_DIFFER
    }
