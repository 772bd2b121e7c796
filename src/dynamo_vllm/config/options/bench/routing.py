"""Options of `bench routing`."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """Replay a trace over several workers, once per router."""

    model: str | None = opt(
        None,
        "workers",
        "Folder of the model, or its hub id (default: a generated tiny model).",
        env="DYN_VLLM_BENCH_ROUTING_MODEL",
        metavar="MODEL",
    )
    workers: int = opt(2, "workers", "Workers to start.", env="DYN_VLLM_BENCH_ROUTING_WORKERS", metavar="N")
    simulate: bool = opt(
        False,
        "workers",
        "Start nothing: use the runtime's simulator of engines on GPUs, with its own router. For kv and "
        "round-robin.",
        env="DYN_VLLM_BENCH_ROUTING_SIMULATE",
    )
    prefill_workers: int = opt(
        0,
        "workers",
        "With --simulate, prefill workers beside the others, which then decode only.",
        env="DYN_VLLM_BENCH_ROUTING_PREFILL_WORKERS",
        metavar="N",
    )
    cache_blocks: int | None = opt(
        None,
        "workers",
        "KV blocks of each engine (default: what it has room for; with --simulate 65536 of 16 tokens).",
        env="DYN_VLLM_BENCH_ROUTING_CACHE_BLOCKS",
        metavar="N",
    )
    kv_offload_gb: float | None = opt(
        None,
        "workers",
        "Measure every mode also with workers that have this much host memory each for KV caches, in turn "
        "with those that have none.",
        env="DYN_VLLM_BENCH_ROUTING_KV_OFFLOAD_GB",
        metavar="GB",
    )
    engine_args: str = opt(
        "",
        "workers",
        "Flags of every worker and its engine, as one argument: '--max-model-len 8192'.",
        env="DYN_VLLM_BENCH_ROUTING_ENGINE_ARGS",
        metavar="FLAGS",
    )
    mode: tuple[str, ...] = opt(
        ("kv", "round-robin", "random"),
        "routing",
        "Router to measure; the first is compared with the others. To set other options of the frontend: "
        "'heavy=--router kv --kv-overlap-weight 2'. May be given several times.",
        env="DYN_VLLM_BENCH_ROUTING_MODE",
        metavar="NAME[=FLAGS]",
        repeats=True,
    )
    rounds: int = opt(
        3, "routing", "Replays of each mode, in turn.", env="DYN_VLLM_BENCH_ROUTING_ROUNDS", metavar="N"
    )
    trace: str | None = opt(
        None,
        "trace",
        "File of JSON lines in the Mooncake format, or a trace that is made here: tenants, agents, alone "
        "(nothing in common), bursts, shared (one prefix).",
        env="DYN_VLLM_BENCH_ROUTING_TRACE",
        metavar="FILE",
    )
    trace_block: int | None = opt(
        None,
        "trace",
        "Tokens for each block of the trace; a multiple of the engine's block size (default: 32, and 512, "
        "the recorded length, with --simulate).",
        env="DYN_VLLM_BENCH_ROUTING_TRACE_BLOCK",
        metavar="N",
    )
    limit: int | None = opt(
        None,
        "trace",
        "Replay only the first requests.",
        env="DYN_VLLM_BENCH_ROUTING_LIMIT",
        metavar="N",
    )
    output_tokens: int | None = opt(
        None,
        "trace",
        "Longest answer (default: 2, because routing is about prompts; with --simulate the trace's own).",
        env="DYN_VLLM_BENCH_ROUTING_OUTPUT_TOKENS",
        metavar="N",
    )
    rate_scale: float = opt(
        1.0,
        "trace",
        "Replay this many times faster.",
        env="DYN_VLLM_BENCH_ROUTING_RATE_SCALE",
        metavar="FACTOR",
    )
    rate: float | None = opt(
        None,
        "trace",
        "Requests per second at random times, instead of the trace's own times.",
        env="DYN_VLLM_BENCH_ROUTING_RATE",
        metavar="R",
    )
    seed: int = opt(1, "trace", "Same seed, same prompts.", env="DYN_VLLM_BENCH_ROUTING_SEED")
    json: str | None = opt(
        None,
        "report",
        "Write the figures of every replay to this file.",
        env="DYN_VLLM_BENCH_ROUTING_JSON",
        metavar="FILE",
    )
