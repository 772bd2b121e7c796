"""Options of `bench plane`."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions:
    """Measure the request path without an engine."""

    concurrency: int = opt(
        32, "load", "Requests at a time.", env="DYN_VLLM_BENCH_PLANE_CONCURRENCY", metavar="N"
    )
    requests: int = opt(
        256, "load", "Requests of one measurement.", env="DYN_VLLM_BENCH_PLANE_REQUESTS", metavar="N"
    )
    input_tokens: int = opt(
        16, "load", "Tokens of a prompt.", env="DYN_VLLM_BENCH_PLANE_INPUT_TOKENS", metavar="N"
    )
    output_tokens: int = opt(
        256, "load", "Tokens of an answer.", env="DYN_VLLM_BENCH_PLANE_OUTPUT_TOKENS", metavar="N"
    )
    tokens_per_frame: int = opt(
        1,
        "load",
        "Tokens that our fake engine emits at once.",
        env="DYN_VLLM_BENCH_PLANE_TOKENS_PER_FRAME",
        metavar="N",
    )
    rounds: int = opt(
        3, "load", "Measurements of each worker, in turn.", env="DYN_VLLM_BENCH_PLANE_ROUNDS", metavar="N"
    )
    frontend: bool = opt(True, "load", "Measure through a frontend too.", env="DYN_VLLM_BENCH_PLANE_FRONTEND")
    peer: tuple[str, ...] = opt(
        (),
        "peers",
        "Another worker to measure in turn with ours; it gets --model and --served-model-name. May be "
        "given several times.",
        env="DYN_VLLM_BENCH_PLANE_PEER",
        metavar="NAME=COMMAND",
        repeats=True,
    )
    json: str | None = opt(
        None, "report", "Write the figures to this file.", env="DYN_VLLM_BENCH_PLANE_JSON", metavar="FILE"
    )
