"""Records a span for every request of this worker, in the frontend's trace.

The runtime records the spans of the frontend, the router and the call to this worker; vLLM records its own
below ours. All code here wraps the request path: with traces off none of it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.serving.logging import trace_ids
from dynamo_vllm.serving.request.cancel import Cancellable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.serving.request.sender import Sender

    Generate = Callable[[object, "TracedContext", Sender], AsyncIterator[dict[str, Any]]]

FLUSH_SECONDS = 2.0
NAME = "worker.generate"
FIRST, REST = "worker.first_token", "worker.further_tokens"


class TracedContext(Cancellable, Protocol):
    """The part of the runtime's context that we use."""

    def trace_headers(self) -> Mapping[str, str] | None:
        """None for a request that is not traced."""


class Tracing:
    """The spans of one worker; its `generate` replaces the service's."""

    def __init__(self, provider: TracerProvider, role: str, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("dynamo_vllm")
        self._propagator = TraceContextTextMapPropagator()
        self._about = {"dynamo_vllm.role": role, "gen_ai.request.model": model}
        self._open: dict[str, Span] = {}

    def headers(self, request_id: str) -> Mapping[str, str] | None:
        """Return the headers that make the engine's span a child of the request's."""
        span = self._open.get(request_id)
        if span is None:
            return None
        from opentelemetry.trace import set_span_in_context

        found: dict[str, str] = {}
        self._propagator.inject(found, set_span_in_context(span))
        return found

    def around(self, generate: Generate) -> Generate:
        """The parameter names are the runtime's, as in `Service.generate`."""

        async def traced(
            request: object, context: TracedContext, response_sender: Sender
        ) -> AsyncIterator[dict[str, Any]]:
            headers = context.trace_headers()
            if headers is None:
                async for chunk in generate(request, context, response_sender):
                    yield chunk
                return
            with self._span(context.id(), headers, request) as recorder:
                recorder.sender = response_sender
                async for chunk in generate(request, context, recorder):
                    yield chunk
                recorder.client_left = context.is_stopped() and not recorder.is_finished

        return traced

    @contextlib.contextmanager
    def _span(self, request_id: str, headers: Mapping[str, str], request: object) -> Iterator[Recorder]:
        from opentelemetry.trace import Status, StatusCode

        began = time.time_ns()
        span = self._tracer.start_span(
            NAME,
            context=self._propagator.extract(headers),
            attributes=self._about | {"dynamo_vllm.request_id": request_id},
            start_time=began,
        )
        recorder = Recorder(began)
        self._open[request_id] = span
        trace_ids[request_id] = f"{span.get_span_context().trace_id:032x}"
        try:
            yield recorder
        except (asyncio.CancelledError, GeneratorExit):
            span.set_attribute("dynamo_vllm.outcome", "cancelled")
            raise
        except BaseException as exc:
            # Not its text, which may contain request content.
            span.set_status(Status(StatusCode.ERROR, type(exc).__name__))
            span.set_attribute("error.type", type(exc).__name__)
            raise
        finally:
            self._open.pop(request_id, None)
            trace_ids.pop(request_id, None)
            self._end(span, recorder, request)

    def _end(self, span: Span, recorder: Recorder, request: object) -> None:
        """The phases become separate spans, known only now."""
        from opentelemetry.trace import set_span_in_context

        ended = time.time_ns()
        inside = set_span_in_context(span)
        span.set_attributes(recorder.found | transfer(request, recorder))
        first = recorder.first_ns
        phases = [(FIRST, recorder.began_ns, first or ended)]
        if first is not None and recorder.chunks > 1:
            phases.append((REST, first, ended))
        for name, start, end in phases:
            self._tracer.start_span(name, context=inside, start_time=start).end(end)
        span.end(ended)


class Recorder:
    """Wraps the runtime's sender and observes the chunks."""

    __slots__ = ("_chunk", "began_ns", "chunks", "client_left", "first_ns", "sender", "tokens")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.first_ns: int | None = None
        self.chunks = self.tokens = 0
        self.client_left = False
        self.sender: Sender | None = None
        self._chunk: dict[str, Any] = {}

    def send(self, chunk: dict[str, Any]) -> None:
        if self.first_ns is None:
            self.first_ns = time.time_ns()
        self.chunks += 1
        self.tokens += len(chunk.get("token_ids") or ())
        self._chunk = chunk
        assert self.sender is not None
        self.sender.send(chunk)

    def close(self) -> None:
        assert self.sender is not None
        self.sender.close()

    @property
    def is_finished(self) -> bool:
        return self._chunk.get("finish_reason") is not None

    @property
    def handed_over(self) -> bool:
        return bool(self._chunk.get("disaggregated_params"))

    @property
    def found(self) -> dict[str, Any]:
        usage = self._chunk.get("completion_usage") or {}
        known = {
            "gen_ai.usage.output_tokens": self.tokens,
            "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
            "dynamo_vllm.cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "dynamo_vllm.decode_cached_tokens": (self._chunk.get("engine_data") or {}).get(
                "decode_cached_tokens"
            ),
            "dynamo_vllm.finish_reason": self._chunk.get("finish_reason"),
            "dynamo_vllm.outcome": "client left" if self.client_left else None,
            "dynamo_vllm.first_token_seconds": (self.first_ns - self.began_ns) / 1e9
            if self.first_ns
            else None,
        }
        return {name: value for name, value in known.items() if value is not None}


def transfer(request: object, recorder: Recorder) -> dict[str, str]:
    """Describe the KV cache transfer between prefill and decode; fetched tokens count as cached."""
    if recorder.handed_over:
        return {"dynamo_vllm.transfer": "handed over"}
    if isinstance(request, dict) and request.get("prefill_result"):
        return {"dynamo_vllm.transfer": "asked for"}
    return {}


@contextlib.contextmanager
def opened(options: WorkerOptions, model: str) -> Iterator[Tracing | None]:
    """Return the tracer; None if traces are off. Only after the engine runs: exporters have threads, and vLLM
    forks."""
    if options.traces_url is None:
        yield None
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter(options.traces_url, options.otlp_protocol)))
    try:
        yield Tracing(provider, options.role, model)
    finally:
        flush(provider)


def flush(provider: TracerProvider) -> None:
    """Send the remaining spans with a short timeout: a missing receiver must not delay shutdown.

    OpenTelemetry 1.45 accepts a timeout here and waits for its exporter anyway.
    """
    last = threading.Thread(target=provider.force_flush, name="last-spans", daemon=True)
    last.start()
    last.join(FLUSH_SECONDS)


def exporter(url: str, protocol: str) -> Any:
    """Choose as vLLM does; importing both would take a third of a second more."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=url, insecure=not url.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=url)
