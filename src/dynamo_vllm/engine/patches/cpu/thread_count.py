"""Makes an engine on CPU use as many threads as OMP_NUM_THREADS says.

What is wrong: OpenMP reads the variable when it is loaded. In a forked engine core this was long before the
worker chose the number. vLLM 0.30 prevents a later change: its worker replaces `torch.set_num_threads`.

What we do: set the number before vLLM's worker replaces the function.

It can go when vLLM sets the number itself, or allows setting it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import T, on_cpu, source, wrap
from dynamo_vllm.engine.process.cpu_threads import COUNT

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.worker.cpu_worker import CPUWorker


def apply() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    wrap(CPUWorker, "init_device", _with_threads)


def still_needed() -> bool:
    from vllm.v1.worker.cpu_worker import CPUWorker

    return "torch.set_num_threads = skip_set_num_threads" in source(CPUWorker.init_device)


def _with_threads(original: Callable[[CPUWorker], T]) -> Callable[[CPUWorker], T]:
    import torch

    def init_device(self: CPUWorker) -> T:
        if (threads := os.environ.get(COUNT, "")).isdecimal():
            torch.set_num_threads(int(threads))
        return original(self)

    return init_device


PATCHES = (
    on_cpu(
        name="cpu-thread-count",
        targets=("vllm.v1.worker.cpu_worker.CPUWorker.init_device",),
        defect="a forked engine core cannot change its number of threads",
        apply=apply,
        still_needed=still_needed,
    ),
)
