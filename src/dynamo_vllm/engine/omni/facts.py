"""Reads the facts of a pipeline of vLLM-Omni that has started."""

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
_NO_SLEEP = "a pipeline of vLLM-Omni does not sleep; stop it instead"


async def read(omni: AsyncOmni, limits: PipelineLimits | None) -> EngineFacts:
    """`limits` are those of a pipeline that generates media; None for one that generates text."""
    bos = await _bos(omni)
    config = omni.vllm_config
    if config is None:
        return EngineFacts(
            # Of no meaning where nothing is written; a card needs some.
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
    """The first token of a health check; the role has one of its own where a pipeline knows none."""
    try:
        async with asyncio.timeout(BOS_SECONDS):
            tokenizer = await omni.get_tokenizer()
    except Exception as exc:  # a pipeline that only draws has none, and says so in several ways
        logger.debug("no tokenizer in this pipeline: %s", exc)
        return None
    found = getattr(tokenizer, "bos_token_id", None)
    return found if isinstance(found, int) else None
