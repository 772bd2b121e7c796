"""Tells prometheus_client of a multi-process folder that was named after its import.

What is wrong: prometheus_client reads PROMETHEUS_MULTIPROC_DIR once, when it is imported. A worker that was
forked from a process with vLLM in it names its folder later, and its series would be missing.

What we do: let the library choose again.

It can go when prometheus_client looks when a series is made.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from dynamo_vllm.engine.patches.patch import Patch, Where

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def came_late() -> bool:
    values = _values()
    return values is not None and FOLDER in os.environ and values.ValueClass is values.MutexValue


def apply() -> None:
    if (values := _values()) is not None and came_late():
        values.ValueClass = values.get_value_class()


def still_needed() -> bool:
    from prometheus_client import values

    return "\nValueClass = get_value_class()\n" in Path(values.__file__).read_text()


def _values() -> Any:
    """Not imported here: that would be too early for those who have no folder yet."""
    return sys.modules.get("prometheus_client.values")


PATCHES = (
    Patch(
        name="prometheus-folder",
        targets=("prometheus_client.values.ValueClass",),
        package="prometheus_client",
        versions=">=0.21",
        defect="a multi-process folder that is named after the import is not heeded",
        where=(Where.WORKER,),
        apply=apply,
        still_needed=still_needed,
        only_if=came_late,
    ),
)
