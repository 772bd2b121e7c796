"""Options of `bench scale`."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """Measure several frontends and many workers, without an engine."""

    frontends: str = opt(
        "1,2",
        "deployment",
        "Frontends of a deployment; 1,2,4 measures three in turn.",
        env="DYN_VLLM_BENCH_SCALE_FRONTENDS",
        metavar="N,…",
    )
    workers: str = opt(
        "8",
        "deployment",
        "Workers of a deployment; 8,32 measures one after the other.",
        env="DYN_VLLM_BENCH_SCALE_WORKERS",
        metavar="N,…",
    )
    cached_blocks: int = opt(
        0,
        "deployment",
        "Also measure with this many cached blocks, which each worker announces to the routers; the prompts "
        "are among them.",
        env="DYN_VLLM_BENCH_SCALE_CACHED_BLOCKS",
        metavar="N",
    )
    streams: int = opt(
        64, "load", "Streams at a time, over all frontends.", env="DYN_VLLM_BENCH_SCALE_STREAMS", metavar="N"
    )
    requests: int | None = opt(
        None,
        "load",
        "Requests of one measurement (default: 8 for each stream).",
        env="DYN_VLLM_BENCH_SCALE_REQUESTS",
        metavar="N",
    )
    input_tokens: int = opt(
        256, "load", "Tokens of a prompt.", env="DYN_VLLM_BENCH_SCALE_INPUT_TOKENS", metavar="N"
    )
    output_tokens: int = opt(
        64, "load", "Tokens of an answer.", env="DYN_VLLM_BENCH_SCALE_OUTPUT_TOKENS", metavar="N"
    )
    token_ms: float = opt(
        0.0,
        "load",
        "Time between the tokens of a stream; 0 is as fast as possible.",
        env="DYN_VLLM_BENCH_SCALE_TOKEN_MS",
        metavar="MS",
    )
    ramp_seconds: float | None = opt(
        None,
        "load",
        "Send one request for each stream, spread over this time; --token-ms keeps the first open until the "
        "last has begun.",
        env="DYN_VLLM_BENCH_SCALE_RAMP_SECONDS",
        metavar="S",
    )
    rounds: int = opt(
        3, "load", "Measurements of each deployment, in turn.", env="DYN_VLLM_BENCH_SCALE_ROUNDS", metavar="N"
    )
    max_seconds: float | None = opt(
        None,
        "load",
        "Begin no further measurement after this time.",
        env="DYN_VLLM_BENCH_SCALE_MAX_SECONDS",
        metavar="S",
    )
    json: str | None = opt(
        None,
        "report",
        "Write the figures to this file, after every measurement.",
        env="DYN_VLLM_BENCH_SCALE_JSON",
        flags=("--json", "--output"),
        metavar="FILE",
    )
