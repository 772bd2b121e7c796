"""Runs transcription jobs: an engine request for each window of sound, some at a time, answers in order."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

from dynamo_vllm.codec.transcripts import TICK, Joiner, spans
from dynamo_vllm.engine import sound
from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.engine.vllm.control import lora_request
from dynamo_vllm.errors import EngineRequestFailed
from dynamo_vllm.job import Output, SpeechPiece, SpeechSegment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from vllm import SamplingParams

    from dynamo_vllm.engine.base import Sink
    from dynamo_vllm.engine.vllm.names import Llm
    from dynamo_vllm.engine.vllm.parts.speech import VllmSpeech
    from dynamo_vllm.job import Job, SpeechSpec

AT_ONCE = 8
"""Windows of one job in the engine. The others wait here, not before the windows of other jobs."""
_TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
_ABORTED = Output([], finish="abort", finished=True)


class SpeechRuns:
    """Runs the transcription jobs of one engine."""

    def __init__(self, llm: Llm, speech: VllmSpeech) -> None:
        self._llm = llm
        self._speech = speech
        self._at_once = max(1, min(AT_ONCE, llm.vllm_config.scheduler_config.max_num_seqs // 2))
        self._runs: dict[str, _Run] = {}

    async def stream(self, job: Job, spec: SpeechSpec, rank: int | None, sink: Sink) -> None:
        """Runs a job until its last output; if the sink raises, the job ends and this raises the same."""
        run = self._runs[job.id] = _Run(self._llm, self._speech, job, spec, rank, self._at_once)
        try:
            async with contextlib.aclosing(run.outputs()) as outputs:
                async for output in outputs:
                    sink(output)
        finally:
            self._runs.pop(job.id, None)
            await run.end()
            spec.drop_sound()

    def abort(self, job_id: str) -> None:
        """Lets no further window of a job begin; vLLM aborts those that have."""
        if run := self._runs.get(job_id):
            run.abort()


class _Run:
    """One job."""

    def __init__(
        self, llm: Llm, speech: VllmSpeech, job: Job, spec: SpeechSpec, rank: int | None, at_once: int
    ) -> None:
        self._llm = llm
        self._speech = speech
        self._job = job
        self._spec = spec
        self._rank = rank
        self._room = asyncio.Semaphore(at_once)
        self._is_aborted = False
        # What each window has given: outputs, the last of them with its end; or an exception.
        self._given: list[asyncio.Queue[Output | Exception]] = [asyncio.Queue() for _ in spec.windows]
        self._tasks: list[asyncio.Task[None]] = []

    def abort(self) -> None:
        self._is_aborted = True
        for given in self._given:
            given.put_nowait(_ABORTED)

    async def end(self) -> None:
        """Ends what still runs: vLLM aborts the requests of cancelled tasks."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        spec = self._spec
        language = spec.language or await self._detect()
        if self._is_aborted or language is None:
            yield _ABORTED
            return
        prompt = self._speech.prompt(spec.task, language, spec.hint, timestamps=spec.timestamps)
        params = convert.sampling_params(self._job.sampling)
        self._tasks = [
            asyncio.create_task(self._window(number, prompt, params)) for number in range(len(spec.windows))
        ]
        joiner = Joiner("en" if spec.task == "translate" else language)
        late: list[int] = []
        for number in range(len(spec.windows)):
            joiner.begin_window()
            async for output in self._read(number):
                if output.finish == "abort":
                    yield _ABORTED
                    return
                piece = self._piece(number, output, joiner, language)
                late += output.token_ids
                if piece.text or piece.segments:
                    yield Output(late, speech=piece)
                    late = []
        end = SpeechPiece("", language)
        yield Output(late, finish="stop", finished=True, cached_tokens=0, speech=end)

    async def _read(self, number: int) -> AsyncGenerator[Output, None]:
        """Yields the outputs of a window as they come; with timestamps, all of them as one."""
        is_timed, gathered = self._spec.timestamps, Output([], logprobs=[])
        while True:
            given = await self._given[number].get()
            if isinstance(given, Exception):
                raise given
            if not is_timed or given.finish == "abort":
                yield given
            else:
                gathered.token_ids = [*gathered.token_ids, *given.token_ids]
                gathered.logprobs = [*(gathered.logprobs or ()), *(given.logprobs or ())]
            if given.finished:
                break
        if is_timed:
            yield gathered

    def _piece(self, number: int, output: Output, joiner: Joiner, language: str) -> SpeechPiece:
        if not self._spec.timestamps:
            text = output.text or ""
            if "<|" in text:  # a model may write a time without being asked
                text = _TIMESTAMP.sub("", text)
            return SpeechPiece(joiner.add(text), language)
        segments = list(self._segments(number, output))
        return SpeechPiece("".join(joiner.add(segment.text) for segment in segments), language, segments)

    def _segments(self, number: int, output: Output) -> Iterator[SpeechSegment]:
        """Yields the segments of a window that have a text."""
        spec, speech, ids = self._spec, self._speech, output.token_ids
        first, last = spec.windows[number]
        offset = first / spec.rate
        for span in spans(ids, speech.first_timestamp, speech.ticks(last - first, spec.rate)):
            tokens = [ids[place] for place in span.places]
            text = speech.text(tokens)
            if not text.strip():
                continue
            chances = [position.chosen.logprob for position in (output.logprobs or ())]
            some = [chances[place] for place in span.places if place < len(chances)]
            yield SpeechSegment(
                offset + span.start * TICK,
                offset + span.end * TICK,
                text,
                tokens,
                sum(some) / len(some) if some else 0.0,
                offset,
            )

    # --- engine requests ---------------------------------------------------------------------------------

    async def _detect(self) -> str | None:
        """Returns the language of the first window that is not silent; None if the job was aborted."""
        speech, spec = self._speech, self._spec
        params = convert.sampling_params(self._job.sampling)
        params.max_tokens, params.temperature, params.logprobs = 1, 0.0, None
        params.seed = None
        params.allowed_token_ids = speech.language_ids
        number = next(
            (
                at
                for at, (first, last) in enumerate(spec.windows)
                if not sound.is_silent(spec.samples[first:last])
            ),
            0,
        )
        async with contextlib.aclosing(self._generated(number, speech.start, params)) as outputs:
            async for output in outputs:
                if output.finish == "abort":
                    return None
                if output.token_ids:
                    return speech.language(output.token_ids[0])
        raise EngineRequestFailed("the engine did not say the language")

    async def _window(self, number: int, prompt: list[int], params: SamplingParams) -> None:
        """Runs one window when there is room for it."""
        given = self._given[number]
        try:
            async with self._room:
                if self._is_aborted:
                    return
                async with contextlib.aclosing(self._generated(number, prompt, params)) as outputs:
                    async for output in outputs:
                        given.put_nowait(output)
        except Exception as exc:
            given.put_nowait(exc)

    async def _generated(
        self, number: int, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[Output, None]:
        job, spec, has_begun = self._job, self._spec, False
        first, last = spec.windows[number]
        made = await self._speech.rendered(spec.samples[first:last], spec.rate, prompt)
        if self._is_aborted:
            yield _ABORTED
            return
        try:
            stream = self._llm.generate(
                made,
                params.clone(),
                job.id,
                lora_request=lora_request(job.adapter) if job.adapter else None,
                trace_headers=job.trace_headers,
                priority=job.priority,
                data_parallel_rank=self._rank,
            )
            async with contextlib.aclosing(stream):
                async for result in stream:
                    for output in convert.outputs(result):
                        if output.finish == "error":
                            raise convert.error_without_exception(job, has_begun)
                        yield output
                    has_begun = True
        except Exception as exc:
            raise convert.error(exc, job, has_begun) from exc
