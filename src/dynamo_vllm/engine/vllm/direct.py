"""Sends tokens from the engine's output straight to a job's sink, past vLLM's own queues.

AsyncLLM gives each request a queue and a task that waits on it, and builds two objects for every token on
the way. Here vLLM's output handler, which sees the outputs of each engine step together, calls the sinks. All
else stays vLLM's: a request's checks, its state, figures, traces, aborts and its end with the engine. Only
jobs whose outputs need no further work go this way: one choice, no log-probabilities, no text.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.engine.vllm.control import lora_request
from dynamo_vllm.job import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.engine.base import Sink
    from dynamo_vllm.engine.vllm.names import Llm, Request
    from dynamo_vllm.job import Job


class Direct:
    """The jobs of one engine that go this way."""

    def __init__(self, llm: Llm) -> None:
        self._llm = llm
        self._taps: dict[str, Tap] = {}
        processor = llm.output_processor
        self._others: Callable[..., Any] = processor.process_outputs
        processor.process_outputs = self._process

    def _process(
        self, outputs: list[Any], moment: float | None = None, iteration: Any = None, **more: object
    ) -> Any:
        """One pass over a step's outputs; vLLM's own code gets those that are more than further tokens.

        Since 0.32 vLLM gives the version of the model's weights too, which our answers do not tell.
        """
        taps, others = self._taps, []
        for output in outputs:
            tap = taps.get(output.request_id)
            if tap is None or output.finish_reason is not None or output.events is not None:
                others.append(output)
                continue
            state, sink = tap.state, tap.sink
            if state.is_prefilling or output.num_nans_in_logits or sink is None:
                others.append(output)
                continue
            ids = output.new_token_ids
            if iteration is not None:
                count, stats = len(ids), state.stats
                iteration.num_generation_tokens += count
                iteration.inter_token_latencies_iter.append(moment - stats.last_token_ts)
                stats.num_generation_tokens += count
                stats.last_token_ts = moment
            try:
                sink(Output(ids))
            except Exception as exc:
                tap.fail(exc)
        return self._others(others, moment, iteration, **more)

    def fits(self, job: Job) -> bool:
        """Whether the engine's output for this job is the answer as it is."""
        sampling = job.sampling
        return (
            sampling.n == 1
            and sampling.logprobs is None
            and sampling.prompt_logprobs is None
            and not sampling.detokenize
            and not sampling.stop
            and self._llm.output_processor.stream_interval == 1
        )

    async def stream(self, job: Job, rank: int | None, sink: Sink) -> None:
        """Until the last output; an error of the sink ends the job and comes out here as it is."""
        llm = self._llm
        request = await _request(llm, job, rank)
        tap = Tap(job, sink)
        llm.output_processor.add_request(request, None, None, 0, tap)
        tap.attach(llm.output_processor.request_states[request.request_id])
        self._taps[request.request_id] = tap
        try:
            await _send(llm, job, request)
            await tap.done
        except BaseException:
            tap.sink = None
            await llm.abort(request.request_id, internal=True)  # nothing to do where it has ended
            raise
        finally:
            del self._taps[request.request_id]


async def _request(llm: Llm, job: Job, rank: int | None) -> Request:
    """What AsyncLLM does with a prompt before it queues it."""
    try:
        if llm.errored:
            raise llm.dead_error
        request = llm.input_processor.process_inputs(
            job.id,
            convert.engine_input(job),
            convert.sampling_params(job.sampling, job.transfer),
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


async def _send(llm: Llm, job: Job, request: Request) -> None:
    try:
        await llm.engine_core.add_request_async(request)
    except Exception as exc:
        raise convert.error(exc, job) from exc


class Tap:
    """Stands where vLLM keeps a request's queue; its methods run inside vLLM's output handler.

    Nothing may be raised there: it would end the handler, and with it every request.
    """

    __slots__ = ("_job", "done", "has_begun", "sink", "state")

    def __init__(self, job: Job, sink: Sink) -> None:
        self._job = job
        self.sink: Sink | None = sink
        """None once no output may reach it any more."""
        self.state: Any = None
        self.has_begun = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def attach(self, state: Any) -> None:
        """From now on vLLM's state of the request makes no objects for a queue but calls the sink."""
        self.state = state
        state.make_request_output = self.output

    def output(
        self,
        new_token_ids: list[int],
        pooling_output: object,
        finish_reason: object | None,
        stop_reason: int | str | None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
        error: object = None,
    ) -> None:
        """What vLLM's own pass has for this job; None tells it that nothing is left to hand on."""
        if self.sink is None:
            return
        try:
            if finish_reason is None:
                self._begin()
                self.sink(Output(new_token_ids))
            else:
                self._last(new_token_ids, str(finish_reason), stop_reason, kv_transfer_params)
        except Exception as exc:
            self.fail(exc)

    def _begin(self) -> None:
        self.has_begun = True
        if self._job.media is not None:
            self._job.media.drop_media()

    def _last(
        self, ids: list[int], finish: str, stop: int | str | None, transfer: dict[str, Any] | None
    ) -> None:
        if finish == "error":
            raise convert.gave_up(self._job, self.has_begun)
        sink, self.sink = self.sink, None
        if sink is not None:
            sink(
                Output(
                    ids,
                    finish=finish,
                    stop_reason=stop,
                    finished=True,
                    cached_tokens=self.state.num_cached_tokens,
                    transfer=transfer,
                )
            )
        if not self.done.done():
            self.done.set_result(None)

    def put(self, exc: Exception) -> None:
        """vLLM calls this for every request when the engine dies."""
        self.fail(convert.error(exc, self._job, has_begun=True))

    def fail(self, exc: Exception) -> None:
        self.sink = None
        if not self.done.done():
            self.done.set_exception(exc)
