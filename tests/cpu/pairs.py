"""A prefill and a decode worker over NIXL, and requests to each of them past the frontend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_vllm.supervise.discovery import forget
from harness.forks import RUN_COMMAND
from harness.plane import Plane, plane
from harness.stack import Stack, Worker
from harness.warm import Zygote

NIXL = ("--connector", "nixl", "--disaggregation-mode")
LOST = "dynamo_component_kv_transfers_lost_total"
IN_FLIGHT = "dynamo_component_requests_in_flight"
ROUNDS = int(os.environ.get("DYNAMO_VLLM_ROUNDS", "1"))
"""How often each fault is repeated; CI uses the default."""


@dataclass
class Pairs:
    """Is a frontend with prefill and decode workers, which may be killed and replaced."""

    stack: Stack
    warm: Zygote
    model: Path
    flags: tuple[str, ...] = ()
    call: str = RUN_COMMAND
    prefills: list[Worker] = field(default_factory=list)
    decodes: list[Worker] = field(default_factory=list)

    def add(self, role: str, *flags: str) -> Worker:
        flags = (*NIXL, role, *self.flags, *flags)
        worker = self.warm.start_worker(self.stack, self.model, *flags, call=self.call)
        (self.prefills if role == "prefill" else self.decodes).append(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """Kills a worker as a crash would, and removes it from discovery as `serve` does."""
        before = {i["instance_id"]: i["component"] for i in self.stack.instances()}
        component = "prefill" if worker in self.prefills else "backend"
        os.killpg(worker.pid, signal.SIGKILL)
        worker.process.wait(60)
        for group in (self.prefills, self.decodes, self.stack.workers):
            with contextlib.suppress(ValueError):
                group.remove(worker)
        alive = {self.instance(other) for other in self.stack.workers}
        for instance, found in before.items():
            if found == component and instance not in alive:
                asyncio.run(forget(instance, self.stack.environment()))

    def instance(self, worker: Worker) -> int:
        line = next(line for line in worker.log.read_text().splitlines() if " instance=" in line)
        return int(line.rpartition("instance=")[2])

    def replace(self, role: str) -> Worker:
        worker = self.add(role)
        self.stack.wait_ready(120).wait_over_two()
        return worker

    def is_alive(self) -> bool:
        return all(worker.process.poll() is None for worker in self.stack.workers)


@contextlib.contextmanager
def caller(made: Stack) -> Iterator[Plane]:
    with plane(made.environment(DYN_TCP_RPC_HOST="127.0.0.1")) as found:
        yield found


def request(prompt: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "token_ids": prompt,
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "output_options": {},
        **more,
    }


def handed_over(found: Plane, prompt: list[int]) -> dict[str, Any]:
    """Returns what a prefill worker answers after it has computed the prompt."""
    answer = found.call("prefill.generate", request(prompt, 1))
    handed: dict[str, Any] = answer["chunks"][-1]["disaggregated_params"]
    return handed


def tokens(found: Plane, prompt: list[int], handed: Any = None) -> list[int]:
    """Returns the answer of a decode worker; `handed` is what the prefill worker returned."""
    more: dict[str, Any] = {} if handed is None else {"prefill_result": {"disaggregated_params": handed}}
    answer = found.call("backend.generate", request(prompt, **more))
    assert "error" not in answer, answer
    return [token for chunk in answer["chunks"] for token in chunk["token_ids"]]


def prompts(count: int, longest: int, seed: int = 3) -> list[list[int]]:
    chance = random.Random(seed)
    lengths = [1, longest, *(chance.randrange(1, longest) for _ in range(count - 2))][:count]
    return [[chance.randrange(10, 900) for _ in range(length)] for length in lengths]


def prompt(length: int) -> list[int]:
    """Returns a new prompt each time."""
    return [random.randrange(10, 900) for _ in range(length)]
