"""Makes prometheus_client use a multi-process folder that is set after its import.

What is wrong: prometheus_client reads PROMETHEUS_MULTIPROC_DIR once, when it is imported. A worker that is
forked from a process that has imported vLLM sets its folder later, and its series would be missing.

What we do: have the library read the variable again.

It can go when prometheus_client reads the variable when a series is created.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from dynamo_vllm.engine.patches.patch import Patch, Where

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def is_set_too_late() -> bool:
    values = _values()
    return values is not None and FOLDER in os.environ and values.ValueClass is values.MutexValue


def apply() -> None:
    if (values := _values()) is not None and is_set_too_late():
        values.ValueClass = values.get_value_class()


def still_needed() -> bool:
    from prometheus_client import values

    return "\nValueClass = get_value_class()\n" in Path(values.__file__).read_text()


def _values() -> Any:
    """Returns the module if it is loaded; importing it here would be too early if no folder is set yet."""
    return sys.modules.get("prometheus_client.values")


PATCHES = (
    Patch(
        name="prometheus-folder",
        targets=("prometheus_client.values.ValueClass",),
        package="prometheus_client",
        versions=">=0.21",
        defect="a multi-process folder that is set after the import is ignored",
        where=(Where.WORKER,),
        apply=apply,
        still_needed=still_needed,
        only_if=is_set_too_late,
    ),
)
