"""From the options of `bench load` to the stages it runs. Pure but for reading the trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.bench.load import arrivals, trace
from dynamo_vllm.bench.load.messages import StageSpec
from dynamo_vllm.bench.load.prompts import PromptSpec
from dynamo_vllm.config.rules import bench as written
from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.config.options import LoadOptions

DEFAULT_SECONDS = 10.0


def stages(options: LoadOptions, model: str, context: int | None, scaled: trace.Trace) -> list[StageSpec]:
    """Every stage in its order; `context` is the longest prompt and answer, where it is known."""
    _fits(options, context)
    loads: list[tuple[str, int | None, float | None]]
    if options.prompts == "trace" and not (options.concurrency or options.rate or options.ramp):
        loads = [("trace", None, None)]
    elif options.rate:
        loads = [(f"rate={rate:g}", None, rate) for rate in written.rates(options)]
    elif options.ramp:
        loads = [(f"rate={rate:g}", None, rate) for rate in arrivals.ramp(*written.ramp(options))]
    else:
        loads = [(f"c={count}", count, None) for count in written.concurrencies(options)]
    return [
        StageSpec(
            name=name,
            prompts=prompts(options, model, f"{number}", scaled),
            concurrency=concurrency,
            rate=rate,
            arrivals=options.arrivals,
            requests=_requests(options, scaled),
            seconds=_seconds(options),
            warmup=options.warmup,
        )
        for number, (name, concurrency, rate) in enumerate(loads)
    ]


def prompts(options: LoadOptions, model: str, stage: str, scaled: trace.Trace) -> PromptSpec:
    return PromptSpec(
        kind=options.prompts,
        api=options.api,
        model=model,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        vocab=written.vocab(options),
        prefix_tokens=options.prefix_tokens,
        prefixes=options.prefixes,
        turns=options.turns,
        seed=options.seed,
        stage=stage,
        ignore_eos=options.ignore_eos,
        more=written.body(options),
        requests=scaled.requests,
    )


def trace_lines(options: LoadOptions) -> list[trace.Line]:
    """The lines of the trace; none where no trace is asked for."""
    if options.prompts != "trace" or options.trace is None:
        return []
    return trace.read(Path(options.trace), options.trace_limit)


def replay(options: LoadOptions, lines: Sequence[trace.Line], context: int | None) -> trace.Trace:
    """The trace as it will be sent."""
    if not lines:
        return trace.Trace([])
    return trace.scale(lines, block=options.trace_block, speed=options.trace_speed, context=context)


def client_processes(options: LoadOptions, cores: int | None = None) -> int:
    """As many as asked for, or half the cores: the other half is for the server."""
    return options.clients or max(1, (cores or usable_cores()) // 2)


def _requests(options: LoadOptions, scaled: trace.Trace) -> int | None:
    if options.prompts == "trace":
        return min(options.requests or len(scaled.requests), len(scaled.requests))
    return options.requests


def _seconds(options: LoadOptions) -> float | None:
    if options.seconds is None and options.requests is None and options.prompts != "trace":
        return DEFAULT_SECONDS
    return options.seconds


def _fits(options: LoadOptions, context: int | None) -> None:
    if context is None or options.prompts == "trace":
        return
    prefix = options.prefix_tokens if options.prompts == "prefix" else 0
    turns = options.turns if options.prompts == "turns" else 1
    wanted = prefix + turns * (options.input_tokens + options.output_tokens)
    if wanted > context:
        raise ConfigError(
            f"prompt and answer of {wanted} tokens do not fit into the model's context of {context}; "
            "lower --input-tokens or --output-tokens"
        )
