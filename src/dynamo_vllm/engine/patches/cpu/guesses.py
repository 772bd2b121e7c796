"""Lets an engine on CPU check the guesses of speculative decoding. Two patches.

What is wrong: the sampler of vLLM 0.30 that checks guesses holds on to kernels of Triton, which a CPU does
not have: vLLM replaces the names in the module, and the sampler looks at its own (`use_cpu_kernels`); 0.31
registers its kernels where the sampler looks. In 0.30 to 0.32 the CPU kernel that gives every guess its
request's temperature writes into a copy, and the caller reads memory that nobody wrote (`expand`). Either
ends the engine with its first guess.

What we do: give the sampler the kernels that vLLM wrote for CPUs, and expand the values with torch.

They can go when speculative decoding with n-grams runs in vLLM on CPU without Triton.
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
    """Each value as often as its request has guesses, which `cu_num_tokens` has added up."""
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
        defect="guesses are checked with kernels of Triton, which a CPU does not have",
        apply=use_cpu_kernels,
        still_needed=sampler_keeps_its_kernels,
        only_if=triton_is_missing,
    ),
    on_cpu(
        name="cpu-guesses-temperatures",
        targets=(f"{_SAMPLER}.expand_batch_to_tokens",),
        defect="the temperatures of guesses are read from memory that nobody wrote",
        upstream="https://github.com/vllm-project/vllm/pull/42638",
        apply=expand,
        still_needed=kernel_writes_into_a_copy,
        only_if=triton_is_missing,
    ),
)
