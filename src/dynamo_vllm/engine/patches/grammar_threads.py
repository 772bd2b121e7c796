"""Compiles guides in the engine core at a lower priority than the engine's steps, and not one after another.

What is wrong: vLLM 0.30 compiles in half as many threads as there are cores, on two cores in one: a guide
that takes a second holds up all behind it. And xgrammar uses eight threads for each, beside which the steps
of an engine on a CPU get little.

What we do: replace the executor by one with more threads, which step back behind the engine's. Judged guides
are small enough to be compiled side by side.

It can go when vLLM compiles guides side by side, at a lower priority.
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
"""At least."""
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
    return ThreadPoolExecutor(threads, "guides", initializer=_step_back)


def _step_back() -> None:
    """On Linux a thread has a priority of its own, and gives it to those that it starts."""
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)


PATCHES = (
    in_vllm(
        name="grammar-threads",
        targets=("vllm.v1.structured_output.StructuredOutputManager.__init__",),
        defect="guides are compiled one after another, and in the way of the engine's steps",
        where=(Where.ENGINE,),
        apply=apply,
        still_needed=still_needed,
    ),
)
