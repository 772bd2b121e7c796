"""Starts a real engine with steps that are slow or hang if a prompt asks for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from harness.stack import Stack, Worker
from harness.waiting import until

CALL = "cpu.faulty_steps:run_command"
"""For `Zygote.start_worker`: the engine core is forked from the worker, and so has these changes."""
SLOW, LOCKED = 700, 701
"""The first tokens of prompts for faulty steps: such a step computes for as many seconds as the prompt is
long, or waits for a lock until `unlock`.
"""


def run_command(module: str, argv: Sequence[str]) -> int:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from dynamo_vllm.cli import main

    execute = GPUModelRunner.execute_model

    def faulty(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduled.scheduled_new_reqs:
            begin(request.prompt_token_ids)
        return execute(self, scheduled, *args, **kwargs)

    GPUModelRunner.execute_model = faulty
    return main.run_command(module, argv)


def begin(prompt: Sequence[int]) -> None:
    if prompt[0] == SLOW:
        compute(len(prompt))
    elif prompt[0] == LOCKED:
        lock = threading.Lock()
        lock.acquire()
        signal.signal(signal.SIGUSR1, lambda *_: lock.release())
        print("waiting for a lock", flush=True)
        lock.acquire()


def compute(seconds: float) -> None:
    import torch

    print("computing", flush=True)
    matrix = torch.rand(256, 256)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        matrix = torch.mm(matrix, matrix).clamp(0, 1)


def ask(made: Stack, prompt: list[int]) -> int:
    """Returns the tokens of an answer."""
    answer = made.openai.completions.create(
        model="tiny", prompt=prompt, max_tokens=3, timeout=300, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    return int(answer.usage.completion_tokens)


def wait_out_of_service(made: Stack, worker: Worker) -> float:
    """Returns the seconds until the worker gets no more requests."""
    began = time.monotonic()
    until("not ready", lambda: not worker.is_ready() and made.get("/health").status_code == 503, 60, 0.1)
    return time.monotonic() - began


def wait_in_service(made: Stack, worker: Worker) -> None:
    until("ready again", lambda: worker.is_ready() and made.get("/health").status_code == 200)


def unlock(core: int) -> None:
    os.kill(core, signal.SIGUSR1)
