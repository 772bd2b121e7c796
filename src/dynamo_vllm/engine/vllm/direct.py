"""Sends tokens from the engine's output directly to a job's sink, past vLLM's own queues.

AsyncLLM gives each request a queue and a task that waits on it, and creates two objects per token. Here
vLLM's output handler, which gets the outputs of each engine step together, calls the sinks. Everything else
stays vLLM's: validation, request state, metrics, traces, aborts and engine death. Only jobs whose outputs
need no further work use this path: one choice, no log-probabilities, no text.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.engine.vllm.runs.requests import prepared
from dynamo_vllm.job import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.engine.base import Sink
    from dynamo_vllm.engine.vllm.names import Llm, Request
    from dynamo_vllm.job import Job


class Direct:
    """Runs the jobs of one engine that use this path."""

    def __init__(self, llm: Llm) -> None:
        self._llm = llm
        self._taps: dict[str, Tap] = {}
        processor = llm.output_processor
        self._others: Callable[..., Any] = processor.process_outputs
        processor.process_outputs = self._process

    def _process(
        self, outputs: list[Any], moment: float | None = None, iteration: Any = None, **more: object
    ) -> Any:
        """Handles a step's outputs that only have further tokens; vLLM's own code handles the others.

        Since 0.32 vLLM also passes the version of the model's weights, which our answers do not report.
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
        """Returns whether the engine's output for this job is the answer without further work."""
        return job.sampling.gives_only_tokens and self._llm.output_processor.stream_interval == 1

    async def stream(self, job: Job, rank: int | None, sink: Sink) -> None:
        """Runs a job until its last output; if the sink raises, the job ends and this raises the same."""
        llm = self._llm
        try:
            prompt, params = convert.engine_input(job), convert.sampling_params(job.sampling, job.transfer)
        except Exception as exc:
            raise convert.error(exc, job) from exc
        request = await prepared(llm, job, prompt, params, rank)
        tap = Tap(job, sink)
        llm.output_processor.add_request(request, None, None, 0, tap)
        tap.attach(llm.output_processor.request_states[request.request_id])
        self._taps[request.request_id] = tap
        try:
            await _send(llm, job, request)
            await tap.done
        except BaseException:
            tap.sink = None
            await llm.abort(request.request_id, internal=True)  # does nothing if it has ended
            raise
        finally:
            del self._taps[request.request_id]


async def _send(llm: Llm, job: Job, request: Request) -> None:
    try:
        await llm.engine_core.add_request_async(request)
    except Exception as exc:
        raise convert.error(exc, job) from exc


class Tap:
    """Replaces a request's output queue in vLLM; its methods run inside vLLM's output handler.

    They must not raise: an exception would end the handler, and with it every request.
    """

    __slots__ = ("_job", "done", "has_begun", "sink", "state")

    def __init__(self, job: Job, sink: Sink) -> None:
        self._job = job
        self.sink: Sink | None = sink
        """Is None when no further output may reach it."""
        self.state: Any = None
        self.has_begun = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def attach(self, state: Any) -> None:
        """Makes vLLM's state of the request call the sink instead of creating objects for a queue."""
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
        """Receives an output that vLLM's own code handled; returns None so that vLLM queues nothing."""
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
            raise convert.error_without_exception(self._job, self.has_begun)
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
        """Fails the job; vLLM calls this for every request when the engine dies."""
        self.fail(convert.error(exc, self._job, has_begun=True))

    def fail(self, exc: Exception) -> None:
        self.sink = None
        if not self.done.done():
            self.done.set_exception(exc)
