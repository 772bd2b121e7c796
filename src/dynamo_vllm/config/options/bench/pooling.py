"""Options of `bench pooling`."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

POOLING_APIS = ("embeddings", "rerank")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingBenchOptions:
    """Measure embeddings or scored pairs per second, of several servers by turns."""

    server: tuple[str, ...] = opt(
        ("http://127.0.0.1:8000",),
        "server",
        "Server to measure, as URL or NAME=URL; may be given several times, and each has its turn in every "
        "round.",
        env="DYN_VLLM_BENCH_POOLING_SERVER",
        metavar="[NAME=]URL",
        repeats=True,
    )
    model: str | None = opt(
        None,
        "server",
        "Model to ask (default: the first one served).",
        env="DYN_VLLM_BENCH_POOLING_MODEL",
        metavar="NAME",
    )
    api: str = opt(
        "embeddings",
        "server",
        "API to call; an item is a text of embeddings, or a document of rerank.",
        env="DYN_VLLM_BENCH_POOLING_API",
        choices=POOLING_APIS,
    )
    items: int = opt(64, "load", "Items of a request.", env="DYN_VLLM_BENCH_POOLING_ITEMS", metavar="N")
    words: int = opt(64, "load", "English words of an item.", env="DYN_VLLM_BENCH_POOLING_WORDS", metavar="N")
    base64: bool = opt(False, "load", "Ask for embeddings in base64.", env="DYN_VLLM_BENCH_POOLING_BASE64")
    concurrency: int = opt(
        8, "load", "Requests in flight.", env="DYN_VLLM_BENCH_POOLING_CONCURRENCY", metavar="N"
    )
    requests: int = opt(64, "load", "Requests of a turn.", env="DYN_VLLM_BENCH_POOLING_REQUESTS", metavar="N")
    rounds: int = opt(3, "load", "Turns of each server.", env="DYN_VLLM_BENCH_POOLING_ROUNDS", metavar="N")
    seed: int = opt(1, "load", "Same seed, same texts.", env="DYN_VLLM_BENCH_POOLING_SEED", metavar="N")
    timeout: float = opt(
        600.0,
        "load",
        "Seconds after which a request has failed.",
        env="DYN_VLLM_BENCH_POOLING_TIMEOUT",
        metavar="SECONDS",
    )
    watch: tuple[str, ...] = opt(
        (),
        "report",
        "Report the CPU time of this process per item; may be given several times. Labels that begin with a "
        "server's name and a dot count in that server's turns only.",
        env="DYN_VLLM_BENCH_POOLING_WATCH",
        metavar="LABEL=PID",
        repeats=True,
    )
    json: str | None = opt(
        None,
        "report",
        "Write the figures to this file.",
        env="DYN_VLLM_BENCH_POOLING_JSON",
        metavar="FILE",
    )
