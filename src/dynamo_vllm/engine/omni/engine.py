"""Implements the Engine protocol with a running AsyncOmni of vLLM-Omni: text and drawing stages.

What imports vLLM is imported where it is used: tests run this engine without vLLM.
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

PATIENCE_SECONDS = 600.0
"""How long one drawing may take before silence counts as a hang: a pipeline says nothing between steps."""
ABORT_SECONDS = 5.0
DEAD_SECONDS = 1.0
"""For the stages that live on when one died; they end with this process anyway."""
_WITNESSES = ("canary-", "warm-up")
"""Jobs of our own that must answer soon; they are no excuse for silence."""


class OmniEngine:
    """Feeds a running pipeline jobs and turns what its stages yield into outputs."""

    def __init__(self, omni: AsyncOmni, facts: EngineFacts, parts: EngineParts, on_load: OnLoad) -> None:
        self.facts = facts
        self.parts = parts
        self.counting = Counting()
        self._omni = omni
        self._on_load = on_load
        self._is_dead = False
        self._is_closed = False
        self._running: set[str] = set()
        self._drawing: set[str] = set()
        """Drawings of clients: silence is no hang while they run."""
        self._aborted: set[str] = set()
        self._outputs = 0
        self._tokens = 0
        self._moved_at = 0.0
        """When a drawing last gave something, or the first of those that wait came."""

    async def stream(self, job: Job, sink: Sink) -> None:
        outputs = self._written(job) if job.pipeline is None else self._drawn(job)
        self._running.add(job.id)
        if job.pipeline is not None and not job.id.startswith(_WITNESSES):
            if not self._drawing:
                self._moved_at = time.monotonic()
            self._drawing.add(job.id)
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
            self._drawing.discard(job.id)
            self._aborted.discard(job.id)
            self._report()

    async def _written(self, job: Job) -> AsyncGenerator[Output, None]:
        """The text of a pipeline; what its later stages would say or draw is not asked for."""
        if job.sampling.n > 1:
            raise InvalidRequest("a pipeline of vLLM-Omni gives one choice", parameter="n")
        from dynamo_vllm.engine.vllm import convert

        prompt: dict[str, Any] = {"prompt_token_ids": list(job.prompt)}
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
                    raise convert.gave_up(job)
                has_ended = has_ended or output.finished
                yield output
        if job.id in self._aborted and not has_ended:
            yield Output((), finish="abort", finished=True)
        elif not has_ended:
            # The frontend shows a stream without an end as a whole answer.
            raise EngineRequestFailed("the pipeline ended without finishing its text")

    async def _drawn(self, job: Job) -> AsyncGenerator[Output, None]:
        """Texts of the stages before, then everything that was drawn in one output."""
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
            # vLLM-Omni 0.30 ends an aborted drawing as if it had come to its end, without a picture.
            yield Output((), finish="abort", finished=True)
            return
        if not made:
            raise EngineRequestFailed("the pipeline ended without making anything")
        yield Output((), finish="stop", finished=True, media=made)

    async def _results(
        self,
        job: Job,
        prompt: dict[str, Any],
        params: Callable[[], list[Any]],
        wanted: list[str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """What vLLM-Omni yields; `params` makes one entry per stage, and may refuse.

        `wanted` leaves out the stages whose kind of output it does not name.
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
        with contextlib.suppress(TimeoutError):  # a stage that hangs; the monitor sees to it
            await self._omni.abort(job_id, timeout=ABORT_SECONDS)

    async def control(self, op: EngineOp) -> int | None:
        raise WrongState(
            f"{type(op).__name__.lower()}: a pipeline of vLLM-Omni cannot; drain or stop the worker"
        )

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._omni.check_health()
        except EngineDeadError as exc:
            self._is_dead = True
            raise EngineDead(str(exc)) from exc

    def outputs_seen(self) -> Mapping[int, int]:
        """Time itself counts while clients' drawings are on their way, for as long as we are patient.

        Since the last output, not since each came: with new clients all the time a hang would never show.
        """
        if self._drawing and time.monotonic() - self._moved_at < PATIENCE_SECONDS:
            self._outputs += 1
        return {0: self._outputs}

    async def vitals(self) -> Mapping[int, Vitals]:
        """Which stage works in which thread is not known; long drawings have `outputs_seen`."""
        return {}

    def metrics_text(self) -> str:
        return prometheus.series()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            # vLLM-Omni 0.30 gives the stages that are left half a minute when one has died.
            limit = DEAD_SECONDS if self._is_dead else None
            await asyncio.wait({in_thread(self._omni.shutdown)}, timeout=limit)
