"""Implements the Engine protocol with vLLM's AsyncLLM.

This module imports vLLM. So only `launch` imports it, after the variables are set and the patches applied.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.engine.exceptions import EngineDeadError

from dynamo_vllm.engine.process import prometheus
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.vllm import convert, rank_activity
from dynamo_vllm.engine.vllm.control import lora_request
from dynamo_vllm.engine.vllm.kv_compatibility import refuse_prompt_logprobs
from dynamo_vllm.errors import DynamoVllmError, EngineDead
from dynamo_vllm.job import Job, Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from dynamo_vllm.engine.base import Counting, EngineOp, EngineParts, Sink
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.engine.structured_output.gate import GuideGate
    from dynamo_vllm.engine.vllm.control import Control
    from dynamo_vllm.engine.vllm.direct import Direct
    from dynamo_vllm.engine.vllm.names import Llm
    from dynamo_vllm.engine.vllm.runs.pooling import PoolingRuns
    from dynamo_vllm.engine.vllm.runs.speech import SpeechRuns
    from dynamo_vllm.job import EngineFacts

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class VllmEngine:
    """Sends jobs to a running AsyncLLM and converts its results to outputs."""

    llm: Llm
    facts: EngineFacts
    parts: EngineParts
    counting: Counting
    steps: Mapping[int, int]
    """The number of steps of each rank, which the stat loggers count."""
    operations: Control
    guides: GuideGate
    direct: Direct | None
    """The path past vLLM's queues; None if it is turned off."""
    pooling: PoolingRuns | None
    """Runs the jobs of a pooling model; None if the model generates."""
    speech: SpeechRuns | None
    """Runs the jobs of a model that writes down speech; None for any other."""
    connector_metrics_url: str | None
    """Where the KV connector serves its own series."""
    ends: contextlib.AsyncExitStack
    """Closes what the launch opened, in reverse order."""

    async def stream(self, job: Job, sink: Sink) -> None:
        if job.sampling.guide is not None:
            admitted = await self.guides.admitted(job)
            if admitted is None:
                sink(Output([], finish="abort", finished=True))
                return
            job = admitted
        if job.media is None or self.parts.media is None:
            await self._stream(job, sink)
            return
        try:
            await self._stream(job, sink)
        except convert.MediaEvicted:
            logger.info("request %s: its media are sent again", job.id)
            again = await self.parts.media.process(job.media.plain, job.media.media)
            job.media.inner = again.inner  # in the same object, which is emptied at the first token
            await self._stream(job, sink)

    async def _stream(self, job: Job, sink: Sink) -> None:
        direct = self.direct
        if job.pooling is not None and self.pooling is not None:
            await self.pooling.stream(job, job.pooling, self._local_rank(job.data_parallel_rank), sink)
            return
        if job.speech is not None and self.speech is not None:
            await self.speech.stream(job, job.speech, self._local_rank(job.data_parallel_rank), sink)
            return
        if direct is not None and direct.fits(job):
            await direct.stream(job, self._local_rank(job.data_parallel_rank), sink)
            return
        async with contextlib.aclosing(self._outputs(job)) as outputs:
            async for output in outputs:
                sink(output)

    async def _outputs(self, job: Job) -> AsyncGenerator[Output, None]:
        """Yields outputs through vLLM's queue, for jobs that need vLLM's own work on each output."""
        refuse_prompt_logprobs(self.llm.vllm_config, job)
        has_begun = False
        try:
            stream = self.llm.generate(
                convert.engine_input(job),
                convert.sampling_params(job.sampling, job.transfer),
                job.id,
                lora_request=lora_request(job.adapter) if job.adapter else None,
                trace_headers=job.trace_headers,
                priority=job.priority,
                data_parallel_rank=self._local_rank(job.data_parallel_rank),
            )
            async with contextlib.aclosing(stream):
                async for result in stream:
                    for output in convert.outputs(result):
                        if output.finish == "error":
                            raise convert.error_without_exception(job, has_begun)
                        yield output
                    if job.media is not None and not has_begun:
                        job.media.drop_media()
                    has_begun = True
        except DynamoVllmError:
            raise
        except Exception as exc:
            raise convert.error(exc, job, has_begun) from exc

    def _local_rank(self, rank: int | None) -> int | None:
        """Returns the rank as vLLM counts: from the first rank that this AsyncLLM manages."""
        return None if rank is None else rank - self.facts.data_parallel_start_rank

    async def abort(self, job_id: str) -> None:
        self.guides.leave(job_id)
        if self.speech is not None:
            self.speech.abort(job_id)
        await self.llm.abort(job_id)

    async def control(self, op: EngineOp) -> int | None:
        return await self.operations.do(op)

    async def check_health(self) -> None:
        try:
            await self.llm.check_health()
        except EngineDeadError as exc:
            raise EngineDead(str(exc)) from exc

    def outputs_seen(self) -> Mapping[int, int]:
        return self.steps

    async def vitals(self) -> Mapping[int, Vitals]:
        found: Mapping[int, Vitals] = await in_thread(functools.partial(rank_activity.read, self.llm))
        return found

    def metrics_text(self) -> str:
        own, url = prometheus.series(), self.connector_metrics_url
        return own + prometheus.fetched(url) if url else own

    async def close(self) -> None:
        await self.ends.aclose()
