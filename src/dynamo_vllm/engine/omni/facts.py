"""Reads the facts of a started vLLM-Omni pipeline."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dynamo_vllm.engine import machine
from dynamo_vllm.job import EngineFacts

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    from dynamo_vllm.job import PipelineLimits

logger = logging.getLogger(__name__)
BOS_SECONDS = 5.0
_NO_SLEEP = "a vLLM-Omni pipeline does not support sleep; stop it instead"


async def read(omni: AsyncOmni, limits: PipelineLimits | None) -> EngineFacts:
    """Returns the facts; `limits` are those of a pipeline that generates media, None for a text pipeline."""
    bos = await _bos(omni)
    config = omni.vllm_config
    if config is None:
        return EngineFacts(
            # Meaningless without a text stage, but a model card needs them.
            context_length=1,
            vocab_size=1,
            block_size=16,
            total_kv_blocks=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            versions=machine.versions(),
            pipeline=limits,
            sleep_refusal=_NO_SLEEP,
        )
    defaults = config.model_config.get_diff_sampling_param()
    return EngineFacts(
        context_length=config.model_config.max_model_len,
        vocab_size=config.model_config.get_vocab_size(),
        block_size=config.cache_config.block_size,
        total_kv_blocks=config.cache_config.num_gpu_blocks or 1,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        bos_token_id=bos,
        sampling_defaults={k: v for k, v in defaults.items() if isinstance(v, int | float)},
        versions=machine.versions(),
        pipeline=limits,
        sleep_refusal=_NO_SLEEP,
    )


async def _bos(omni: AsyncOmni) -> int | None:
    """Returns the first token for health checks; None if unknown, and the role uses its own."""
    try:
        async with asyncio.timeout(BOS_SECONDS):
            tokenizer = await omni.get_tokenizer()
    except Exception as exc:  # a pipeline without text has none, and raises various exceptions
        logger.debug("no tokenizer in this pipeline: %s", exc)
        return None
    found = getattr(tokenizer, "bos_token_id", None)
    return found if isinstance(found, int) else None
