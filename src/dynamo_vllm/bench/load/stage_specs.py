"""Turns the options of `bench load` into the stages it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.bench.load import arrivals, trace
from dynamo_vllm.bench.load.messages import StageSpec
from dynamo_vllm.bench.load.prompts import PromptSpec
from dynamo_vllm.config.rules import bench as rules
from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.config.options import LoadOptions

DEFAULT_SECONDS = 10.0


def stages(options: LoadOptions, model: str, context: int | None, scaled: trace.Trace) -> list[StageSpec]:
    """Return all stages in order; `context` is how many tokens prompt and answer may have, if known."""
    _refuse_too_long(options, context)
    loads: list[tuple[str, int | None, float | None]]
    if options.prompts == "trace" and not (options.concurrency or options.rate or options.ramp):
        loads = [("trace", None, None)]
    elif options.rate:
        loads = [(f"rate={rate:g}", None, rate) for rate in rules.rates(options)]
    elif options.ramp:
        loads = [(f"rate={rate:g}", None, rate) for rate in arrivals.ramp(*rules.ramp(options))]
    else:
        loads = [(f"c={count}", count, None) for count in rules.concurrencies(options)]
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
        vocab=rules.vocab(options),
        prefix_tokens=options.prefix_tokens,
        prefixes=options.prefixes,
        turns=options.turns,
        seed=options.seed,
        stage=stage,
        ignore_eos=options.ignore_eos,
        more=rules.body(options),
        requests=scaled.requests,
    )


def trace_lines(options: LoadOptions) -> list[trace.Line]:
    """Return the lines of the trace; none if the prompts are not a trace."""
    if options.prompts != "trace" or options.trace is None:
        return []
    return trace.read(Path(options.trace), options.trace_limit)


def replay(options: LoadOptions, lines: Sequence[trace.Line], context: int | None) -> trace.Trace:
    """Return the trace, scaled to the model's context."""
    if not lines:
        return trace.Trace([])
    return trace.scale(lines, block=options.trace_block, speed=options.trace_speed, context=context)


def client_count(options: LoadOptions, cores: int | None = None) -> int:
    """Return how many client processes to start; by default half the cores, the rest is for the server."""
    return options.clients or max(1, (cores or usable_cores()) // 2)


def _requests(options: LoadOptions, scaled: trace.Trace) -> int | None:
    if options.prompts == "trace":
        return min(options.requests or len(scaled.requests), len(scaled.requests))
    return options.requests


def _seconds(options: LoadOptions) -> float | None:
    if options.seconds is None and options.requests is None and options.prompts != "trace":
        return DEFAULT_SECONDS
    return options.seconds


def _refuse_too_long(options: LoadOptions, context: int | None) -> None:
    if context is None or options.prompts == "trace":
        return
    prefix = options.prefix_tokens if options.prompts == "prefix" else 0
    turns = options.turns if options.prompts == "turns" else 1
    wanted = prefix + turns * (options.input_tokens + options.output_tokens)
    if wanted > context:
        raise ConfigError(
            f"prompt and answer have {wanted} tokens, and the model's context is {context}; "
            "lower --input-tokens or --output-tokens"
        )
