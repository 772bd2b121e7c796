"""Adds a worker extension to a real engine: a prompt that begins with HUNGRY needs much memory for a step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from dynamo_vllm.engine.patches.cpu_worker import CpuWorkerExtension

HUNGRY, BYTES = 701, 1 << 30
"""The memory is never touched, so that only a process with a limit cannot have it."""


class Hungry(CpuWorkerExtension):  # type: ignore[misc]
    """Is mixed into vLLM's worker; its import changes the steps."""


def _hungry(execute: Any) -> Any:
    @functools.wraps(execute)
    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduled.scheduled_new_reqs:
            if request.prompt_token_ids[0] == HUNGRY:
                torch.empty(BYTES, dtype=torch.uint8)
        return execute(self, scheduled, *args, **kwargs)

    return execute_model


CPUWorker.execute_model = _hungry(CPUWorker.execute_model)
