"""Asks Linux for the AMX registers before an engine on CPU uses them.

What is wrong: on an x86 processor with AMX, vLLM 0.30 to 0.32 computes attention in bfloat16 with these
registers. Linux gives them only to a process that asked for them, and vLLM does not: it relies on another
library that did so before. Where none did, the first request ends the engine with an illegal instruction.

What we do: ask when the worker initialises its device.

It can go when vLLM asks itself.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import T, on_cpu, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.worker.cpu_worker import CPUWorker

logger = logging.getLogger(__name__)


def apply() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    wrap(CPUWorker, "init_device", _with_registers)


def still_needed() -> bool:
    from vllm.platforms import cpu
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.worker import cpu_worker

    return not any("_init_amx" in Path(one.__file__).read_text() for one in (cpu, cpu_attn, cpu_worker))


def _with_registers(original: Callable[[CPUWorker], T]) -> Callable[[CPUWorker], T]:
    import torch

    def init_device(self: CPUWorker) -> T:
        if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
            logger.warning(
                "Linux does not give this process the processor's AMX registers; models in bfloat16 may end "
                "the engine: --dtype float32 avoids that"
            )
        return original(self)

    return init_device


PATCHES = (
    on_cpu(
        name="cpu-amx",
        targets=("vllm.v1.worker.cpu_worker.CPUWorker.init_device",),
        defect="on a processor with AMX the first request of a bfloat16 model may end the engine",
        apply=apply,
        still_needed=still_needed,
    ),
)
