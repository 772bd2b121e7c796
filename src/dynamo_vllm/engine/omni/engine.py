"""Implements the Engine protocol with vLLM-Omni's AsyncOmni: text and diffusion stages.

Modules that import vLLM are imported where they are used: tests run this engine without vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.base import Counting, LoadFigures
from dynamo_vllm.engine.omni import convert as omni_convert
from dynamo_vllm.engine.process import prometheus
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.errors import DynamoVllmError, EngineDead, EngineRequestFailed, InvalidRequest, WrongState
from dynamo_vllm.job import Job, Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from vllm_omni.entrypoints.async_omni import AsyncOmni

    from dynamo_vllm.engine.base import EngineOp, EngineParts, OnLoad, Sink
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.job import EngineFacts

MAX_GENERATION_SECONDS = 600.0
"""The longest time without output that is not a hang: a diffusion stage reports nothing between steps."""
ABORT_SECONDS = 5.0
DEAD_SECONDS = 1.0
"""The limit for shutting down when a stage has died; the other stages end with this process anyway."""
_PROBES = ("canary-", "warm-up")
"""The prefixes of our own jobs. They must answer soon, so a hang is reported while they run."""


class OmniEngine:
    """Sends jobs to a running AsyncOmni and converts its results to outputs."""

    def __init__(self, omni: AsyncOmni, facts: EngineFacts, parts: EngineParts, on_load: OnLoad) -> None:
        self.facts = facts
        self.parts = parts
        self.counting = Counting()
        self._omni = omni
        self._on_load = on_load
        self._is_dead = False
        self._is_closed = False
        self._running: set[str] = set()
        self._generating: set[str] = set()
        """The media jobs of clients: while they run, a time without output is not a hang."""
        self._aborted: set[str] = set()
        self._outputs = 0
        self._tokens = 0
        self._moved_at = 0.0
        """When a job last gave output, or the first of the waiting media jobs started."""

    async def stream(self, job: Job, sink: Sink) -> None:
        outputs = self._text(job) if job.pipeline is None else self._media(job)
        self._running.add(job.id)
        if job.pipeline is not None and not job.id.startswith(_PROBES):
            if not self._generating:
                self._moved_at = time.monotonic()
            self._generating.add(job.id)
        self._report()
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    self._outputs += 1
                    self._tokens += len(output.token_ids)
                    self._moved_at = time.monotonic()
                    sink(output)
        finally:
            self._running.discard(job.id)
            self._generating.discard(job.id)
            self._aborted.discard(job.id)
            self._report()

    async def _text(self, job: Job) -> AsyncGenerator[Output, None]:
        """Yields the text of a pipeline, without the output of later stages."""
        if job.sampling.n > 1:
            raise InvalidRequest("a vLLM-Omni pipeline supports only one choice", parameter="n")
        from dynamo_vllm.engine.vllm import convert

        prompt: dict[str, object] = {"prompt_token_ids": list(job.prompt)}
        if job.cache_salt:
            prompt["cache_salt"] = job.cache_salt
        later = list(self._omni.default_sampling_params_list)[1:]
        has_ended = False
        async for result in self._results(
            job, prompt, lambda: [convert.sampling_params(job.sampling), *later], ["text"] if later else None
        ):
            omni_convert.refuse_failed(result)
            for output in convert.outputs(result):
                if output.finish == "error":
                    raise convert.error_without_exception(job)
                has_ended = has_ended or output.finished
                yield output
        if job.id in self._aborted and not has_ended:
            yield Output((), finish="abort", finished=True)
        elif not has_ended:
            # The frontend would present a stream without a finish reason as a complete answer.
            raise EngineRequestFailed("the pipeline ended without finishing its text")

    async def _media(self, job: Job) -> AsyncGenerator[Output, None]:
        """Yields the texts of earlier stages, then all generated media in one output."""
        spec = job.pipeline
        assert spec is not None
        defaults = self._omni.default_sampling_params_list
        sample_rate = self.facts.pipeline.sample_rate if self.facts.pipeline is not None else None
        made: list[Any] = []
        async for result in self._results(
            job, omni_convert.prompt(spec), lambda: omni_convert.stage_params(spec, defaults)
        ):
            omni_convert.refuse_failed(result)
            if omni_convert.is_aborted(result):
                yield Output((), finish="abort", finished=True)
                return
            made += await asyncio.to_thread(omni_convert.media_of, result, spec, sample_rate)
            if result.final_output_type == "text" and (text := omni_convert.text_of(result)) is not None:
                yield text
        if job.id in self._aborted:
            # vLLM-Omni 0.30 ends an aborted diffusion request as if it had finished, without an image.
            yield Output((), finish="abort", finished=True)
            return
        if not made:
            raise EngineRequestFailed("the pipeline ended without generating anything")
        yield Output((), finish="stop", finished=True, media=made)

    async def _results(
        self,
        job: Job,
        prompt: dict[str, Any],
        params: Callable[[], list[Any]],
        wanted: list[str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yields vLLM-Omni's results. `params` creates the parameters of each stage, and may raise.

        `wanted` has the kinds of output to generate; stages with other kinds do not run.
        """
        from dynamo_vllm.engine.vllm import convert

        if self._is_closed:
            raise EngineDead("the engine is closed")
        has_begun = False
        try:
            stream = self._omni.generate(
                prompt,
                request_id=job.id,
                sampling_params_list=params(),
                output_modalities=wanted,
                priority=job.priority,
            )
            async with contextlib.aclosing(stream):
                async for result in stream:
                    has_begun = True
                    yield result
        except DynamoVllmError:
            raise
        except Exception as exc:
            found = convert.error(exc, job, has_begun)
            self._is_dead = self._is_dead or isinstance(found, EngineDead)
            raise found from exc

    def _report(self) -> None:
        self._on_load(LoadFigures(0, len(self._running), 0, 0.0, self._tokens))

    async def abort(self, job_id: str) -> None:
        if job_id not in self._running or self._is_closed:
            return
        self._aborted.add(job_id)
        with contextlib.suppress(TimeoutError):  # the stage hangs; the monitor detects this
            await self._omni.abort(job_id, timeout=ABORT_SECONDS)

    async def control(self, op: EngineOp) -> int | None:
        raise WrongState(
            f"{type(op).__name__.lower()}: not supported by a vLLM-Omni pipeline; drain or stop the worker"
        )

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._omni.check_health()
        except EngineDeadError as exc:
            self._is_dead = True
            raise EngineDead(str(exc)) from exc

    def outputs_seen(self) -> Mapping[int, int]:
        """Returns the counter of outputs; it also grows while clients' media jobs run within the time limit.

        The limit counts from the last output, not from a job's start: otherwise new jobs would hide a hang.
        """
        if self._generating and time.monotonic() - self._moved_at < MAX_GENERATION_SECONDS:
            self._outputs += 1
        return {0: self._outputs}

    async def vitals(self) -> Mapping[int, Vitals]:
        """Returns nothing: it is unknown which thread runs a stage. `outputs_seen` allows long media jobs."""
        return {}

    def metrics_text(self) -> str:
        return prometheus.series()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            # vLLM-Omni 0.30 waits half a minute for the remaining stages when one has died.
            limit = DEAD_SECONDS if self._is_dead else None
            await asyncio.wait({in_thread(self._omni.shutdown)}, timeout=limit)
