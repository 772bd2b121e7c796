"""Mends for vLLM 0.30 on CPU; loaded in vLLM's workers as their extension.

A seeded request must not end the engine: when a prompt is prefilled in several steps, the tokens sampled on
the way are thrown away and the request's random generator is set back with set_offset, which a CPU generator
does not have. The exception ends the engine. Here the generator is put back to its seed instead, so the
answer does not depend on steps.

Engines with NIXL must not share one core: the connector puts each of them onto the last core of the machine,
where prompts waited for the decode engine to end its answers, a second each. Here it is told of no cores.

Speculative decoding must not end the engine with its first request: the sampler that checks guesses holds on
to kernels of Triton, which a CPU does not have. Here it gets those that vLLM wrote for CPUs; the one that
gives every guess its request's temperature writes into a copy, and is written anew.

Nothing may compile while requests are served (`cpu_eager`).

Prompt embeddings must not end an engine that takes adapters (`cpu_lora`).

The engine computes with as many threads as OMP_NUM_THREADS says. OpenMP reads it when it is loaded, which in
a forked engine core was long before the worker chose the number; vLLM refuses to change it later.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import HAS_TRITON
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dynamo_vllm.engine.patches import cpu_eager, cpu_lora
from dynamo_vllm.engine.process.cpu_threads import COUNT


class KeepsSeeds:
    """vLLM mixes this into its worker; importing it is what mends."""


def _mended(original: Any) -> Any:
    @functools.wraps(original)
    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        thrown_away = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        held = {int(i): generators.pop(int(i)) for i in thrown_away if int(i) in generators}
        for generator in held.values():
            generator.manual_seed(generator.initial_seed())
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(held)

    return bookkeeping


GPUModelRunner._bookkeeping_sync = _mended(GPUModelRunner._bookkeeping_sync)

if envs.VLLM_CPU_OMP_THREADS_BIND == "nobind":  # ours; who binds threads to cores knows which
    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each value as often as its request has guesses, which `cu_num_tokens` has added up."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, x.new_tensor(replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


MENDED_KERNELS = ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens")
if not HAS_TRITON:
    rejection_sampler.expand_batch_to_tokens = expanded
    for name in MENDED_KERNELS:
        getattr(rejection_sampler, f"_{name}").kernel = getattr(cpu_triton_utils, f"{name}_kernel")

cpu_eager.mend()
cpu_lora.mend()


def _with_threads(original: Any) -> Any:
    @functools.wraps(original)
    def init_device(self: Any) -> Any:
        if (threads := os.environ.get(COUNT, "")).isdecimal():
            torch.set_num_threads(int(threads))
        return original(self)

    return init_device


CPUWorker.init_device = _with_threads(CPUWorker.init_device)
