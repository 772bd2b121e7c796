"""Applies our patches in vLLM's workers on CPU, which ask for `CpuWorkerExtension` by its name.

vLLM mixes the class into its worker (`worker_extension_cls`) before the worker is made: no other hook is
called in these processes alone. The patches are applied when the class is looked up; importing the module
does nothing.
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
