"""Runs the prompts of pooling jobs: many engine requests for one job, past vLLM's queue and task for each.

vLLM's own server creates a generator, a task and a queue for every prompt. Here vLLM checks the first prompt
of a job; the others are copies of its request with other tokens, because the role has checked them. Request
state, metrics, traces, aborts and engine death stay vLLM's.
"""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import numpy
import torch
from vllm import PoolingParams

from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.engine.vllm.runs.requests import prepared
from dynamo_vllm.errors import EngineRequestFailed
from dynamo_vllm.job import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_vllm.engine.base import Sink
    from dynamo_vllm.engine.vllm.names import Llm, Request
    from dynamo_vllm.job import Job, PooledPrompt, PoolingSpec, Vector

TYPES = "compressed_token_type_ids"
"""vLLM's name for the place where the second text begins."""


class PoolingRuns:
    """Runs the pooling jobs of one engine."""

    def __init__(self, llm: Llm) -> None:
        self._llm = llm
        # Enough for one job to fill the engine; of a larger job the rest waits here, not before others' jobs.
        self._room = max(64, llm.vllm_config.scheduler_config.max_num_seqs)

    async def stream(self, job: Job, spec: PoolingSpec, rank: int | None, sink: Sink) -> None:
        """Runs a job until its last output; if the sink raises, the job ends and this raises the same."""
        run = _Run(job, spec)
        requests = _requests(spec, await _first(self._llm, job, spec, rank))
        try:
            while not run.is_sent:
                await self._fill(run, requests)
                await run.progress()
                for output in run.outputs():
                    sink(output)
                    if output.finish == "abort":
                        return
                    await asyncio.sleep(0)  # a large answer must not keep other requests waiting
        finally:
            if not run.is_sent:
                run.is_over = True
                await self._llm.abort(job.id)

    async def _fill(self, run: _Run, requests: Iterator[Request]) -> None:
        """Sends the engine as many prompts as it has room for."""
        llm = self._llm
        try:
            while run.running < self._room and (request := next(requests, None)) is not None:
                item = _Item(run, run.begun)
                llm.output_processor.add_request(request, None, None, 0, item)
                item.attach(llm.output_processor.request_states[request.request_id])
                run.begun += 1
                await llm.engine_core.add_request_async(request)
        except Exception as exc:
            raise convert.error(exc, run.job) from exc


def _requests(spec: PoolingSpec, first: Request) -> Iterator[Request]:
    """Yields the engine's request of each prompt; all have the job's id as their external one."""
    yield first
    prefix = first.request_id
    for number, prompt in enumerate(spec.prompts[1:], start=1):
        if prompt.media is not None:
            raise EngineRequestFailed("only the first prompt may have media")
        request = copy.copy(first)
        request.request_id = f"{prefix}-{number}"
        request.prompt_token_ids = list(prompt.tokens)
        if prompt.second_at is not None:
            request.pooling_params = copy.copy(first.pooling_params)
            request.pooling_params.extra_kwargs = {TYPES: prompt.second_at}
        yield request


async def _first(llm: Llm, job: Job, spec: PoolingSpec, rank: int | None) -> Request:
    """Returns the request of the first prompt, which vLLM checks."""
    prompt = spec.prompts[0]
    params = PoolingParams(task=spec.task, dimensions=spec.dimensions, use_activation=spec.use_activation)
    try:
        params.verify(llm.vllm_config.model_config)
    except Exception as exc:
        raise convert.error(exc, job) from exc
    if prompt.second_at is not None:
        params.extra_kwargs = {TYPES: prompt.second_at}
    return await prepared(llm, job, _engine_input(job, prompt), params, rank)


def _engine_input(job: Job, prompt: PooledPrompt) -> dict[str, Any]:
    made = dict(prompt.media.inner) if prompt.media is not None else {}
    if not made:
        made = {"type": "token", "prompt_token_ids": list(prompt.tokens)}
    if job.cache_salt:
        made["cache_salt"] = made.get("cache_salt", "") + job.cache_salt
    return made


class _Run:
    """The state of one job."""

    def __init__(self, job: Job, spec: PoolingSpec) -> None:
        self.job = job
        self._spec = spec
        self._results: list[torch.Tensor | None] = [None] * len(spec.prompts)
        self._ready = 0
        """Prompts from the first on whose results are there."""
        self._sent = 0
        self.begun = 0
        self.ended = 0
        self.cached = 0
        self.is_over = False
        self._failure: Exception | None = None
        self._is_aborted = False
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        return self.begun - self.ended

    @property
    def is_sent(self) -> bool:
        return self._sent == len(self._results)

    def take(self, number: int, result: torch.Tensor, cached: int) -> None:
        self._results[number] = result
        self.ended += 1
        self.cached += cached
        self._changed.set()

    def abort(self) -> None:
        self._is_aborted = True
        self._changed.set()

    def fail(self, exc: Exception) -> None:
        self._failure = self._failure or exc
        self._changed.set()

    async def progress(self) -> None:
        """Waits until something has ended; raises what made the job fail."""
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure

    def outputs(self) -> Iterator[Output]:
        """Yields what can be sent: results in the order of the prompts."""
        if self._is_aborted:
            yield Output([], finish="abort", finished=True)
            return
        results, limit = self._results, self._spec.values_per_output
        while self._ready < len(results) and results[self._ready] is not None:
            self._ready += 1
        is_whole = self._ready == len(results)
        if self._spec.pairs or limit is None:
            if is_whole:
                yield self._all()
            return
        while self._sent < self._ready:
            size = max(1, limit // max(1, _size(results[self._sent])))
            until = min(self._sent + size, self._ready)
            if until - self._sent < size and not is_whole:
                return
            yield self._piece(until)

    def _piece(self, until: int) -> Output:
        first, self._sent = self._sent, until
        vectors = [_array(result) for result in self._results[first:until]]
        self._results[first:until] = [None] * (until - first)  # frees their memory
        return self._output(first, vectors)

    def _all(self) -> Output:
        self._sent = len(self._results)
        if self._spec.pairs:
            return self._output(0, _compared(self._results, self._spec))
        return self._output(0, [_array(result) for result in self._results])

    def _output(self, first: int, vectors: list[Vector]) -> Output:
        is_last = self.is_sent
        return Output(
            [],
            index=first,
            finish="stop" if is_last else None,
            finished=is_last,
            cached_tokens=self.cached if is_last else None,
            pooled=vectors,
        )


class _Item:
    """Replaces the output queue of one prompt in vLLM; its methods run inside vLLM's output handler.

    They must not raise: an exception would end the handler, and with it every request.
    """

    __slots__ = ("_number", "_run", "_state")

    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self._number = number
        self._state: Any = None

    def attach(self, state: Any) -> None:
        """Makes vLLM's state of the request call this instead of creating objects for a queue."""
        self._state = state
        state.make_request_output = self.output

    def output(
        self,
        new_token_ids: list[int],
        pooling_output: torch.Tensor | None,
        finish_reason: object | None,
        stop_reason: int | str | None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
        error: object = None,
    ) -> None:
        """Receives the result; returns None so that vLLM queues nothing."""
        run = self._run
        if run.is_over or finish_reason is None:
            return
        finish = str(finish_reason)
        if finish == "abort":
            run.abort()
        elif finish == "error" or pooling_output is None:
            run.fail(convert.error_without_exception(run.job))
        else:
            run.take(self._number, pooling_output, self._state.num_cached_tokens)

    def put(self, exc: Exception) -> None:
        """Fails the job; vLLM calls this for every request when the engine dies."""
        self._run.fail(convert.error(exc, self._run.job, has_begun=True))


def _size(result: torch.Tensor | None) -> int:
    return 0 if result is None else result.numel()


def _array(result: torch.Tensor | None) -> Vector:
    if result is None:
        raise EngineRequestFailed("the engine gave no result")
    array: Vector = numpy.atleast_1d(result.float().contiguous().numpy())
    return array


def _compared(results: list[torch.Tensor | None], spec: PoolingSpec) -> list[Vector]:
    """Returns the score of each pair: the cosine of two embeddings, or the best matches of their tokens."""
    found: list[Vector] = []
    for one, other in spec.pairs:
        first, second = results[one], results[other]
        if first is None or second is None:
            raise EngineRequestFailed("the engine gave no result")
        if spec.task == "token_embed":
            score = (first.float() @ second.float().T).amax(dim=-1).sum()
        else:
            score = torch.nn.functional.cosine_similarity(first.float(), second.float(), dim=0)
        found.append(_array(score))
    return found
