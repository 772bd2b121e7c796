"""Lets an engine on CPU verify the draft tokens of speculative decoding. Two patches.

What is wrong:

- vLLM 0.30's rejection sampler uses Triton kernels, which a CPU does not have. vLLM replaces the kernels in
  the module, but the sampler has its own references to them. 0.31 registers CPU kernels for the sampler.
- In vLLM 0.30 to 0.32 the CPU kernel that gives every draft token the temperature of its request writes into
  a copy, so the caller reads uninitialised memory.

Each crashes the engine at its first draft token.

What we do: give the sampler vLLM's own CPU kernels (`use_cpu_kernels`), and expand the values with torch
(`expand`).

They can go when vLLM runs n-gram speculative decoding on CPU without Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import on_cpu, source

if TYPE_CHECKING:
    import torch

KERNELS = ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens")


def triton_is_missing() -> bool:
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


def use_cpu_kernels() -> None:
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    for name in KERNELS:
        getattr(rejection_sampler, f"_{name}").kernel = getattr(cpu_triton_utils, f"{name}_kernel")


def sampler_keeps_its_kernels() -> bool:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    text = source(CPUModelRunner._postprocess_triton)
    return "rejection_greedy_sample_kernel" in text and "._rejection_greedy_sample.kernel" not in text


def expand() -> None:
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded


def kernel_writes_into_a_copy() -> bool:
    import torch
    from vllm.utils import cpu_triton_utils

    written = torch.zeros(1, dtype=torch.int32)
    values, ends = torch.tensor([7], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    cpu_triton_utils._expand_kernel_impl(written, values, ends, 0, 0)
    return bool(written.item() != values.item())


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeats each value for every draft token of its request; `cu_num_tokens` has the cumulative counts."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, x.new_tensor(replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


_SAMPLER = "vllm.v1.sample.rejection_sampler"
PATCHES = (
    on_cpu(
        name="cpu-guesses-kernels",
        versions=">=0.30,<0.31",
        targets=tuple(f"{_SAMPLER}._{name}.kernel" for name in KERNELS),
        defect="speculative tokens are verified with Triton kernels, which a CPU does not have",
        apply=use_cpu_kernels,
        still_needed=sampler_keeps_its_kernels,
        only_if=triton_is_missing,
    ),
    on_cpu(
        name="cpu-guesses-temperatures",
        targets=(f"{_SAMPLER}.expand_batch_to_tokens",),
        defect="the temperatures of speculative tokens are read from uninitialised memory",
        upstream="https://github.com/vllm-project/vllm/pull/42638",
        apply=expand,
        still_needed=kernel_writes_into_a_copy,
        only_if=triton_is_missing,
    ),
)
