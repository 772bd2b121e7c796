"""Starts vLLM without our worker, as the reference for comparisons."""

from __future__ import annotations

import os
from typing import Any

from harness.warm import CACHE_BLOCKS


def bare_engine(model: str, *, max_model_len: int = 2048, **flags: Any) -> Any:
    """Yields an AsyncLLM whose engine core is forked from this process."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM 0.30 compiles its sampler within the first request, and dies where there is no C++ compiler.
    torch.compiler.set_stance("force_eager")
    args = AsyncEngineArgs(
        model=model,
        max_model_len=max_model_len,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        distributed_executor_backend="uni",
        num_gpu_blocks_override=CACHE_BLOCKS,
        **flags,
    )
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)
