"""Allows prompt embeddings and tokens in one batch if an engine on CPU has LoRA enabled.

What is wrong: vLLM 0.30 looks up the embeddings of the tokens in a batch without the rows that are prompt
embeddings, but reads the adapter of each token from the list of all rows. On CPU the lengths differ and the
engine crashes; with equal lengths a token would get the adapter of another row.

What we do: each token gets the adapter of its own row.

It can go when vLLM's embedding layer knows which rows of the batch it gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import T, on_cpu, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_rows: torch.Tensor | None = None
"""The rows of the tokens that are looked up in this step; None if all rows are tokens."""


def apply() -> None:
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(VocabParallelEmbeddingWithLoRA, "forward", _of_rows)
    wrap(GPUModelRunner, "_preprocess", _knowing_rows)


def still_needed() -> bool:
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    reads_all_rows = "_embeddings_indices[:num_tokens]" in source(VocabParallelEmbeddingWithLoRA.forward)
    return reads_all_rows and "np.nonzero(is_token_ids)[0]" in source(GPUModelRunner._preprocess)


def _knowing_rows(original: Callable[..., T]) -> Callable[..., T]:
    import numpy as np
    import torch

    def preprocess(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: object, **kwargs: object
    ) -> T:
        global _rows
        if self.enable_prompt_embeds and self.lora_config is not None:
            are_tokens = self.is_token_ids.np[: scheduler_output.total_num_scheduled_tokens]
            if not are_tokens.all():
                _rows = torch.from_numpy(np.nonzero(are_tokens)[0])
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            _rows = None

    return preprocess


def _of_rows(of_all_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    from torch.nn import functional
    from vllm.lora.ops.torch_ops import bgmv_expand

    def forward(self: VocabParallelEmbeddingWithLoRA, x: torch.Tensor) -> torch.Tensor:
        if _rows is None or len(x) != len(_rows):
            return of_all_rows(self, x)
        of_rows, wrapper = _rows, self.punica_wrapper
        output: torch.Tensor = self.base_layer.forward(x)
        adapters = wrapper._token_lora_indices[of_rows]
        adapted = adapters >= 0
        if adapted.any():
            shrunk = functional.embedding(x + wrapper._embeddings_indices[of_rows], self.lora_a_stacked_2d)
            changed = output[adapted]
            bgmv_expand(shrunk[adapted], self.lora_b_stacked, changed, adapters[adapted], True)
            output[adapted] = changed
        return output

    return forward


PATCHES = (
    on_cpu(
        name="cpu-adapters-beside-embeds",
        targets=(
            "vllm.lora.layers.VocabParallelEmbeddingWithLoRA.forward",
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner._preprocess",
        ),
        defect="prompt embeddings in one batch with tokens crash an engine with LoRA enabled",
        upstream="https://github.com/vllm-project/vllm/issues/51122",
        apply=apply,
        still_needed=still_needed,
    ),
)
