"""Compiles guides in the engine core in parallel, at a lower priority than the engine's steps.

What is wrong: vLLM 0.30 compiles guides in half as many threads as there are cores: on two cores a guide that
takes a second delays all that follow. xgrammar uses eight threads for each guide, which take CPU time from
the steps of an engine on CPU.

What we do: replace the executor by one with more threads and a lower priority. Guides that passed the guide
checker are small enough to compile in parallel.

It can go when vLLM compiles guides in parallel, at a lower priority.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.patches.patch import Where, in_vllm, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 4
"""The smallest number of threads."""
NICENESS = 10


def apply() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    wrap(StructuredOutputManager, "__init__", _with_our_executor)


def still_needed() -> bool:
    from vllm.v1.structured_output import StructuredOutputManager

    text = source(StructuredOutputManager.__init__)
    return "max(1, (multiprocessing.cpu_count() + 1) // 2)" in text and "initializer" not in text


def _with_our_executor(make: Callable[..., None]) -> Callable[..., None]:
    def init(manager: Any, *args: Any, **named: Any) -> None:
        make(manager, *args, **named)
        if isinstance(getattr(manager, "executor", None), ThreadPoolExecutor):
            manager.executor.shutdown(wait=False)
            manager.executor = executor(max(THREADS, manager.executor._max_workers))

    return init


def executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "guides", initializer=_lower_priority)


def _lower_priority() -> None:
    """Lowers the priority of this thread; on Linux the threads that it starts inherit it."""
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)


PATCHES = (
    in_vllm(
        name="grammar-threads",
        targets=("vllm.v1.structured_output.StructuredOutputManager.__init__",),
        defect="guides are compiled one after another, with the same priority as the engine's steps",
        where=(Where.ENGINE,),
        apply=apply,
        still_needed=still_needed,
    ),
)
