"""Applies our patches in vLLM's workers on CPU, as their `worker_extension_cls`.

vLLM looks up `CpuWorkerExtension` by name and mixes it into its worker class before it creates the worker. No
other hook is called only in these processes. Looking up the class applies the patches; importing the module
does not.
"""

from __future__ import annotations

from typing import Any

from dynamo_vllm.engine.patches import table
from dynamo_vllm.engine.patches.patch import Where

EXTENSION = "CpuWorkerExtension"
_extension = type(EXTENSION, (), {"__module__": __name__, "__doc__": "Adds nothing to vLLM's worker."})


def __getattr__(name: str) -> Any:
    if name != EXTENSION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    table.apply(Where.CPU_WORKER)
    return _extension
