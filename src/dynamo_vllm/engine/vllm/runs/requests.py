"""Prepares engine requests that are sent past AsyncLLM's queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.engine.vllm.control import lora_request

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams

    from dynamo_vllm.engine.vllm.names import Llm, Request
    from dynamo_vllm.job import Job


async def prepared(
    llm: Llm, job: Job, prompt: dict[str, Any], params: SamplingParams | PoolingParams, rank: int | None
) -> Request:
    """Prepares a request as AsyncLLM does before it queues one."""
    try:
        if llm.errored:
            raise llm.dead_error
        request = llm.input_processor.process_inputs(
            job.id,
            prompt,
            params,
            supported_tasks=await llm.get_supported_tasks(),
            lora_request=lora_request(job.adapter) if job.adapter else None,
            trace_headers=job.trace_headers,
            priority=job.priority,
            data_parallel_rank=rank,
        )
        llm.input_processor.assign_request_id(request)
        llm._run_output_handler()
        llm.check_admission(request_id=request.request_id)
    except Exception as exc:
        raise convert.error(exc, job) from exc
    return request
