"""Starts a real engine whose experts are divided among data-parallel ranks, which vLLM cannot do on a CPU.

Up to 0.32 its communicator for CPUs lacks the two steps that gather the tokens of all ranks and scatter what
the experts made of them. They are added here, over the process group that vLLM has for it. Each rank has a
part of every expert: with whole ones (`--enable-expert-parallel`) vLLM's kernel for CPUs crashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CALL = "cpu.spread_experts:run_command"
"""For `Zygote.start_worker`: the engine cores are forked from the worker, and so have these steps."""


def run_command(module: str, argv: Sequence[str]) -> int:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from dynamo_vllm.cli import main

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    return main.run_command(module, argv)


def all_gatherv(self: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Returns the rows of all ranks, which may have different numbers of them."""
    if isinstance(tensors, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in tensors]
    import torch

    sizes = sizes or [len(tensors)] * self.world_size
    padded = tensors.new_zeros((max(sizes), *tensors.shape[1:]))
    padded[: len(tensors)] = tensors
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, tensor: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """Returns this rank's rows of the sum over all ranks."""
    import torch

    total = tensor.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    sizes = sizes or [len(total) // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].contiguous()
