"""Compiles guides in the engine core at a lower priority than the engine's steps, and not one after another.

vLLM 0.30 compiles in half as many threads as there are cores, on two cores in one: a guide that takes a
second holds up all behind it. And xgrammar uses eight threads for each, beside which the steps of an
engine on a CPU get little. Judged guides are small enough to be compiled side by side.
"""

from __future__ import annotations

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 4
"""At least."""
NICENESS = 10
_MENDED = "dynamo_vllm_mended"


def mend() -> None:
    """Once in each process; what is forked from it has it too."""
    from vllm.v1.structured_output import StructuredOutputManager

    make = StructuredOutputManager.__init__
    if hasattr(make, _MENDED):
        return

    @functools.wraps(make)
    def mended(manager: Any, *args: Any, **named: Any) -> None:
        make(manager, *args, **named)
        if isinstance(getattr(manager, "executor", None), ThreadPoolExecutor):
            manager.executor.shutdown(wait=False)
            manager.executor = executor(max(THREADS, manager.executor._max_workers))

    setattr(mended, _MENDED, True)
    StructuredOutputManager.__init__ = mended


def executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "guides", initializer=_step_back)


def _step_back() -> None:
    """On Linux a thread has a priority of its own, and gives it to those that it starts."""
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)
